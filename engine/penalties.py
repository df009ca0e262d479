"""What sampling parameters add to or take from the logits before the temperature. Edits logits in place.

Order, as in vLLM: logit_bias, min_tokens, repetition penalty, presence and frequency penalty. Each edit touches only
the ids it names, gathered on the host for all rows, so that a batch costs a few indexed writes and no [R, V] pass.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from engine.request import Request
from engine.stopping import stop_ids
from kvtransfer.request_parts import SamplingParams


@dataclass
class TokenCounts:
    """How often each token was seen in one request; catches up with the output instead of counting it anew."""

    prompt: frozenset[int]
    output: Counter[int] = field(default_factory=Counter)
    num_counted: int = 0

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Counts the output tokens that came since the last call."""
        self.output.update(output_token_ids[self.num_counted :])
        self.num_counted = len(output_token_ids)


@dataclass
class Edit:
    """Values for single logits: `values[i]` is for the logit of token `token_ids[i]` in row `rows[i]`."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, token_id: int, value: float) -> None:
        self.rows.append(row)
        self.token_ids.append(token_id)
        self.values.append(value)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and token ids (int64) and values (float32), each [len(rows)]."""
        index = torch.tensor([self.rows, self.token_ids], dtype=torch.int64).to(device)
        return index[0], index[1], torch.tensor(self.values, dtype=torch.float32).to(device)


def counts_tokens(sampling: SamplingParams) -> bool:
    """Whether the parameters need `TokenCounts`."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def edits_logits(request: Request) -> bool:
    """Whether anything in this module applies to the request's next token."""
    sampling = request.sampling
    too_early_to_stop = len(request.output_token_ids) < sampling.min_tokens
    return bool(sampling.logit_bias) or too_early_to_stop or counts_tokens(sampling)


def apply_logit_bias(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Adds each request's `logit_bias` to its row of `logits` [R, V] float32."""
    edit = Edit()
    for row, request in enumerate(requests):
        for token_id, bias in request.sampling.logit_bias.items():
            edit.add(row, token_id, bias)
    if edit.rows:
        rows, token_ids, values = edit.tensors(logits.device)
        logits[rows, token_ids] += values


def mask_early_stops(logits: torch.Tensor, requests: Sequence[Request], eos_token_ids: AbstractSet[int]) -> None:
    """Masks whatever would end a request (`stop_ids`) that has fewer than `min_tokens` output tokens."""
    edit = Edit()
    for row, request in enumerate(requests):
        if len(request.output_token_ids) < request.sampling.min_tokens:
            for token_id in stop_ids(request.sampling, eos_token_ids):
                edit.add(row, token_id, float("-inf"))
    if edit.rows:
        rows, token_ids, values = edit.tensors(logits.device)
        logits[rows, token_ids] = values


def apply_repetition_penalty(
    logits: torch.Tensor, requests: Sequence[Request], counts: Sequence[TokenCounts | None]
) -> None:
    """Divides positive and multiplies negative logits of every token of prompt and output (CTRL, arXiv:1909.05858)."""
    edit = Edit()
    for row, (request, seen) in enumerate(zip(requests, counts, strict=True)):
        penalty = request.sampling.repetition_penalty
        if seen is not None and penalty != 1.0:
            for token_id in seen.prompt | seen.output.keys():
                edit.add(row, token_id, penalty)
    if edit.rows:
        rows, token_ids, penalties = edit.tensors(logits.device)
        before = logits[rows, token_ids]
        logits[rows, token_ids] = torch.where(before > 0, before / penalties, before * penalties)


def apply_count_penalties(
    logits: torch.Tensor, requests: Sequence[Request], counts: Sequence[TokenCounts | None]
) -> None:
    """Subtracts presence_penalty + frequency_penalty * count from every token of the output (OpenAI's formula)."""
    edit = Edit()
    for row, (request, seen) in enumerate(zip(requests, counts, strict=True)):
        presence, frequency = request.sampling.presence_penalty, request.sampling.frequency_penalty
        if seen is not None and (presence, frequency) != (0.0, 0.0):
            for token_id, count in seen.output.items():
                edit.add(row, token_id, presence + frequency * count)
    if edit.rows:
        rows, token_ids, values = edit.tensors(logits.device)
        logits[rows, token_ids] -= values
