"""Turns logits into the next token of every request in a batch. Knows no scheduler and no stopping rule.

    logits --edits (engine.penalties, then engine.token_masks)--> greedy rows: argmax
                                     `-> other rows:  temperature -> top_k -> top_p -> min_p -> race

Filters run in the order of Hugging Face transformers: top_p measures its mass over what top_k left. min_p compares
with the most likely token, which every filter keeps, so its place in the order changes nothing.

Probabilities are integers here: weight = floor(exp((logit - max) / temperature) * 2**40). Sums of integers are exact
in any order, so rows of equal weights give equal tokens, in any batch and on any device, and a token of weight 0 (less
than 1e-12 of the most likely one) can't be drawn. Ties always go to the lower token id. Logits that differ by e, as
those of another batch or another device may in their last bits, give another token about once in 1 / e draws.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch

from engine.noise import draw_key, noise_key
from engine.penalties import (
    TokenCounts,
    apply_count_penalties,
    apply_logit_bias,
    apply_repetition_penalty,
    counts_tokens,
    edits_logits,
    mask_early_stops,
)
from engine.request import Request
from engine.token_masks import TokenMasks, is_constrained
from kernels.sampling import ONE, SamplingKernels, TorchSampling

logger = logging.getLogger(__name__)

NOTHING_LEFT: Final = "what it asks for by a grammar, allowed_token_ids, bad_words or min_tokens leaves no token"
_NEVER = float("-inf")
_ROWS_AT_ONCE = 64
"""Rows that draw together: bounds the float64 and int64 temporaries (64 x 150,000 x 8 bytes = 77 MB each)."""
_CANDIDATES = 1024
"""Tokens that top_p looks at before it sorts the whole vocabulary, which costs ten times as much."""


@dataclass
class _Memory:
    """What the sampler keeps of a request between steps, all of it derived from the request's tokens."""

    noise_key: bytes
    counts: TokenCounts | None
    warned: bool = False


class Sampler:
    """Draws one token a row. Ids out of vocabulary in the parameters are refused at admission, not here."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        kernels: SamplingKernels | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        """`kernels`: of a backend for `device`; plain torch if there are none. `masks`: without them no request may
        have rules on single tokens, such as a grammar."""
        self._vocab_size = vocab_size
        self._masks = masks
        self._kernels = kernels or TorchSampling()
        # Some checkpoints name EOS ids beyond their vocabulary; these can't be sampled and need no mask.
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._device = device
        self._memories: WeakKeyDictionary[Request, _Memory] = WeakKeyDictionary()

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; row i of `logits` [R, V] float32 belongs to `requests[i]`.

        `logits` is not changed. NaN counts as -inf; a row without any finite logit gives token 0 and a line in the log.
        """
        assert logits.shape == (len(requests), self._vocab_size), (tuple(logits.shape), len(requests), self._vocab_size)
        if not requests:
            return []
        if any(edits_logits(request) or is_constrained(request.sampling) for request in requests):
            logits = self._edit(logits, requests)
        peaks, token_ids = self._kernels.greatest(logits)
        if not bool(torch.isfinite(peaks).all()):
            self._warn(peaks, requests)
            logits = torch.nan_to_num(logits, nan=_NEVER, posinf=torch.finfo(logits.dtype).max, neginf=_NEVER)
            peaks, token_ids = self._kernels.greatest(logits)
            self._refuse_stuck(peaks, requests)
        drawing = [row for row, request in enumerate(requests) if request.sampling.temperature > 0.0]
        for start in range(0, len(drawing), _ROWS_AT_ONCE):
            rows = drawing[start : start + _ROWS_AT_ONCE]
            token_ids[rows] = self._draw(logits[rows], peaks[rows], token_ids[rows], [requests[row] for row in rows])
        return [int(token_id) for token_id in token_ids.tolist()]

    def _memory(self, request: Request) -> _Memory:
        memory = self._memories.get(request)
        if memory is None:
            counts = TokenCounts(frozenset(request.prompt_token_ids)) if counts_tokens(request.sampling) else None
            memory = self._memories[request] = _Memory(noise_key(request.spec), counts)
        if memory.counts is not None:
            memory.counts.catch_up(request.output_token_ids)
        return memory

    def _edit(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """A copy of `logits` with each request's bias, masks and penalties."""
        logits = logits.clone()
        counts = [self._memory(request).counts for request in requests]
        apply_logit_bias(logits, requests)
        mask_early_stops(logits, requests, self._eos_token_ids)
        apply_repetition_penalty(logits, requests, counts)
        apply_count_penalties(logits, requests, counts)
        if any(is_constrained(request.sampling) for request in requests):
            assert self._masks is not None, "a request has rules on single tokens, and nobody to keep them"
            self._masks.apply(logits, requests)
        return logits

    def _draw(
        self, logits: torch.Tensor, peaks: torch.Tensor, greedy: torch.Tensor, requests: Sequence[Request]
    ) -> torch.Tensor:
        """Token ids [R] int64, drawn from `logits` [R, V] with the greatest logit `peaks` [R], at `greedy` [R]."""
        weights = self._kernels.token_weights(logits, peaks, self._column([r.sampling.temperature for r in requests]))
        filtering = [
            row for row, r in enumerate(requests) if 0 < r.sampling.top_k < self._vocab_size or r.sampling.top_p < 1.0
        ]
        if filtering:
            top_k = [requests[row].sampling.top_k or self._vocab_size for row in filtering]
            top_p = [requests[row].sampling.top_p for row in filtering]
            weights[filtering] = keep_top(weights[filtering], top_k, top_p)
        if any(r.sampling.min_p > 0.0 for r in requests):
            weights = keep_min_p(weights, self._column([r.sampling.min_p for r in requests]))
        keys = [draw_key(self._memory(r).noise_key, len(r.output_token_ids)) for r in requests]
        return self._kernels.race(weights, self._column(keys, torch.int64), greedy)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[R, 1] on the device."""
        return torch.tensor(values, dtype=dtype).to(self._device).unsqueeze(1)

    def _refuse_stuck(self, peaks: torch.Tensor, requests: Sequence[Request]) -> None:
        """Whoever has rules and no token left by them can't go on."""
        for peak, request in zip(peaks.tolist(), requests, strict=True):
            if self._masks is not None and peak == _NEVER and is_constrained(request.sampling):
                self._masks.refuse(request, NOTHING_LEFT)

    def _warn(self, peaks: torch.Tensor, requests: Sequence[Request]) -> None:
        """One line a request, however many of its rows are broken; none where its own rules leave no token."""
        for peak, request in zip(peaks.tolist(), requests, strict=True):
            memory = self._memory(request)
            if peak == _NEVER and is_constrained(request.sampling):
                continue
            if not math.isfinite(peak) and not memory.warned:
                memory.warned = True
                logger.warning("request %s: logits are masked entirely, infinite or NaN (%s)", request.key, peak)


def keep_top(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """`weights` [R, V] int64 without what top_k (V: all) and then top_p (1.0: all) cut off.

    top_p keeps the fewest tokens, most likely first, whose mass reaches `top_p` of what top_k left.
    """
    vocab_size = weights.shape[-1]
    limits = torch.tensor(top_k, device=weights.device).clamp(max=vocab_size).unsqueeze(1)
    shares = torch.tensor(top_p, dtype=torch.float64, device=weights.device).unsqueeze(1)
    num_kept, settled = _count_kept(weights, limits, shares, min(vocab_size, _CANDIDATES))
    if not settled:
        num_kept, _ = _count_kept(weights, limits, shares, vocab_size)
    return _keep_largest(weights, num_kept)


def _count_kept(
    weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor, width: int
) -> tuple[torch.Tensor, bool]:
    """How many tokens each row keeps [R, 1], seen from its `width` largest, and whether these were enough to tell."""
    largest = torch.topk(weights, width, dim=-1).values
    outside = torch.arange(width, device=weights.device) >= limits
    mass = largest.masked_fill(outside, 0).cumsum(dim=-1)
    unlimited = limits >= weights.shape[-1]
    reach = shares * torch.where(unlimited, weights.sum(dim=-1, keepdim=True), mass[:, -1:])
    num_kept = torch.minimum((mass < reach).sum(dim=-1, keepdim=True) + 1, limits)
    settled = (limits <= width) | (unlimited & (mass[:, -1:] >= reach))
    return num_kept, bool(settled.all())


def _keep_largest(weights: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """`weights` [R, V] with all but the `num_kept` [R, 1] largest of each row set to 0; of equals the first stay."""
    largest = torch.topk(weights, int(num_kept.max()), dim=-1).values
    threshold = largest.gather(1, num_kept - 1)
    above = weights > threshold
    equal = weights == threshold
    num_equal_kept = num_kept - above.sum(dim=-1, keepdim=True)
    return weights.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= num_equal_kept))), 0)


def keep_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`weights` [R, V] int64 without tokens less likely than `min_p` [R, 1] float64 times the most likely one."""
    return weights.masked_fill(weights < min_p * ONE, 0)
