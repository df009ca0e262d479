"""How likely tokens were to the model: log probabilities, ranks and alternatives out of raw logits.

    logits --(sampler: bias, masks, penalties, temperature, filters)--> the token
       `---------- log softmax, float32 -------------------------------> its log probability, and what else was likely

Of the output that is asked row by row, behind the sampler. Of a prompt it is asked of all tokens but the first, and the
output layer runs over a chunk's tokens a few rows at a time, so that no [chunk, vocabulary] matrix is ever there:

    prompt       t0    t1    t2    t3   |  output
    logits of     |--->|     |     |          say how likely t1 was
                       |---->|     |          t2 ...
    scored       [0, num_prompt - 1)
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import torch

from engine.request import RowLogprobs, ScheduledRow
from kvtransfer.request_parts import MIN_LOGPROB, TokenLogprob

ROWS_AT_ONCE: Final = 64
"""Bounds the temporaries, of which an int64 [R, V] is the largest (64 x 150,000 x 8 bytes = 77 MB)."""
_ID_BITS: Final = 32
_NEVER: Final = float("-inf")


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Of row i of `logits` [R, V] float32: token `token_ids[i]`, and the `num_top[i]` most likely ones.

    `logits` is not changed. NaN counts as -inf. Rows don't depend on each other, but a device may add up a row of a
    larger batch in another order: up to 1e-5.
    """
    found = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += _few_rows(logits[part], token_ids[part], num_top[part])
    return found


def _few_rows(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    totals = logits.logsumexp(dim=-1, keepdim=True)
    if not bool(torch.isfinite(totals).all()):
        logits = torch.nan_to_num(logits, nan=_NEVER, posinf=torch.finfo(logits.dtype).max, neginf=_NEVER)
        totals = logits.logsumexp(dim=-1, keepdim=True)
    keys = likelihood_keys(logits)
    own = torch.tensor(token_ids, dtype=torch.int64).to(logits.device).unsqueeze(1)
    ranks = (keys > keys.gather(1, own)).sum(dim=-1) + 1
    top = keys.topk(min(max(num_top), logits.shape[-1]), dim=-1).indices
    chosen = logits.gather(1, torch.cat([own, top], dim=1)) - totals
    # Without any finite logit the difference is NaN; in the last bit it may be above 0.
    chosen = torch.nan_to_num(chosen, nan=MIN_LOGPROB, neginf=MIN_LOGPROB).clamp(MIN_LOGPROB, 0.0)
    rows = zip(ranks.tolist(), top.tolist(), chosen.tolist(), num_top, strict=True)
    return [
        TokenLogprob(row[0], rank, tuple(zip(ids[:count], row[1:], strict=False))) for rank, ids, row, count in rows
    ]


def likelihood_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [R, V] of float32 logits without NaN: all different, the greater the likelier; of equals the lower id wins.

    A float's bits, read as an integer, are in the float's order; those of negative ones are in the reverse one.
    """
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # 0.0 for -0.0, which is equal to it
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << _ID_BITS) - torch.arange(logits.shape[-1], device=logits.device)


class PromptScores:
    """Takes the logits of one step's scored tokens, slice by slice, in the order of the rows."""

    def __init__(self, rows: Sequence[ScheduledRow]) -> None:
        scored = [(index, row.request, row.scored) for index, row in enumerate(rows) if row.request.scores_prompt]
        self._places = {index: len(places) for index, _, places in scored if places}
        self._targets = [request.prompt_token_ids[place + 1] for _, request, places in scored for place in places]
        self._num_top = [request.sampling.num_prompt_logprobs or 0 for _, request, places in scored for _ in places]
        self._found: list[TokenLogprob] = []

    def take(self, logits: torch.Tensor) -> None:
        """The next `logits` [n, V] float32."""
        part = slice(len(self._found), len(self._found) + len(logits))
        self._found += token_logprobs(logits, self._targets[part], self._num_top[part])

    def by_row(self) -> dict[int, tuple[TokenLogprob, ...]]:
        """What rows have told of the prompt, by their index; often nothing."""
        assert len(self._found) == len(self._targets), (len(self._found), len(self._targets))
        found = iter(self._found)
        return {index: tuple(islice(found, count)) for index, count in self._places.items()}


def sampled_logprobs(
    logits: torch.Tensor, rows: Sequence[ScheduledRow], token_ids: Sequence[int]
) -> dict[int, TokenLogprob]:
    """By index, of those rows that ask for it: row i of `logits` [R, V] gave `token_ids[i]` to `rows[i]`."""
    asking = [index for index, row in enumerate(rows) if row.request.sampling.num_logprobs is not None]
    if not asking:
        return {}
    num_top = [rows[index].request.sampling.num_logprobs or 0 for index in asking]
    found = token_logprobs(logits[asking], [token_ids[index] for index in asking], num_top)
    return dict(zip(asking, found, strict=True))


def row_logprobs(
    sampled: Mapping[int, TokenLogprob], prompts: Mapping[int, tuple[TokenLogprob, ...]]
) -> dict[int, RowLogprobs]:
    """Of those rows of a step that have any, by their index."""
    rows = sampled.keys() | prompts.keys()
    return {index: RowLogprobs(sampled.get(index), prompts.get(index, ())) for index in rows}
