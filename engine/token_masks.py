"""Which tokens may come next in each row of a step: what grammars, allowed_token_ids and bad_words leave.

A step's masks are made in a thread while the forward runs, and joined before its tokens are drawn:

    step loop   | schedule | begin |======== forward ========| apply | draw |
    masks       |          |   follow new tokens, fill rows  |

All that is kept of a request follows from its tokens: who preempts, resumes or moves it has nothing to hand over.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from engine.bitmask import Words, add_mask, addends_of, forbid, mask_logits, num_words, words_of
from engine.errors import AccidentError, RejectedError
from engine.grammars import Grammars
from engine.request import Request
from grammar.compiler import fault_of
from kvtransfer.request_parts import SamplingParams

_CPU: Final = torch.device("cpu")
_ALL: Final = -1  # a word with all bits set


@dataclass
class _Track:
    """Where one request stands. `allowed`: a row of its allowed_token_ids."""

    matcher: LLMatcher | None
    allowed: Words | None
    num_followed: int = 0


def is_constrained(sampling: SamplingParams) -> bool:
    """Whether anything in this module applies to a request."""
    return sampling.grammar is not None or bool(sampling.bad_words) or bool(sampling.allowed_token_ids)


class TokenMasks:
    """The masks of a worker's steps. One step at a time; `refused` holds whom no token was left for, and why."""

    def __init__(self, vocab_size: int, grammars: Grammars, device: torch.device = _CPU, num_threads: int = 1) -> None:
        """`device`: where logits are. `num_threads`: that fill rows of grammars at once."""
        self.refused: dict[Request, str] = {}
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._is_on_cpu = device.type == "cpu"
        self._tracks: WeakKeyDictionary[Request, _Track] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filler = LLExecutor(num_threads=num_threads)
        self._job: tuple[list[Request], Future[torch.Tensor]] | None = None

    def adopt(self, request: Request, matcher: LLMatcher) -> None:
        """`matcher` has followed the request's output so far; without this it is compiled when first needed."""
        self._tracks[request] = self._track_of(request.sampling, matcher, len(request.output_token_ids))

    def begin(self, requests: Sequence[Request]) -> None:
        """Starts on the masks of those whose next token is drawn in this step."""
        constrained = [request for request in requests if is_constrained(request.sampling)]
        self._job = (constrained, self._thread.submit(self._make, constrained)) if constrained else None

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Masks `logits` [R, V] in place; row i belongs to `requests[i]`."""
        rows = [row for row, request in enumerate(requests) if is_constrained(request.sampling)]
        if rows:
            mask = self._mask_of([requests[row] for row in rows])
            (add_mask if self._is_on_cpu else mask_logits)(logits, rows, mask)

    def refuse(self, request: Request, reason: str) -> None:
        """No token can be drawn for the request any more; the first reason counts."""
        self.refused.setdefault(request, reason)

    def take_refused(self) -> dict[Request, str]:
        """Those of the last step; each is handed out once."""
        refused, self.refused = self.refused, {}
        return refused

    def fill(self, requests: Sequence[Request]) -> Words:
        """The masks [len(requests), W] of constrained requests. A row that can't be made allows everything, and its
        request is in `refused`."""
        words = np.full((len(requests), num_words(self._vocab_size)), _ALL, dtype=np.int32)
        followed = [(row, request) for row, request in enumerate(requests) if self._follow(request)]
        matchers = [
            (matcher, row) for row, request in followed if (matcher := self._tracks[request].matcher) is not None
        ]
        if matchers:
            self._filler.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.shape[1] * 4, len(words))
        for row, request in followed:
            self._narrow(words[row], request)
        return words

    def _make(self, requests: Sequence[Request]) -> torch.Tensor:
        """`fill` as the device wants it."""
        words = self.fill(requests)
        return addends_of(words, self._vocab_size) if self._is_on_cpu else torch.from_numpy(words)

    def _mask_of(self, requests: list[Request]) -> torch.Tensor:
        """What `begin` has started on, if it was for these."""
        job, self._job = self._job, None
        if job is not None and job[0] == requests:
            return job[1].result()
        return self._thread.submit(self._make, requests).result()

    def _track_of(self, sampling: SamplingParams, matcher: LLMatcher | None, num_followed: int) -> _Track:
        allowed = sampling.allowed_token_ids
        return _Track(matcher, words_of(allowed, self._vocab_size) if allowed else None, num_followed)

    def _follow(self, request: Request) -> bool:
        """Brings the request's matcher up to its last token; False if it has none any more."""
        try:
            track = self._tracks.get(request)
            if track is None:
                has_grammar = request.sampling.grammar is not None
                matcher = self._grammars.matcher_for(request) if has_grammar else None
                track = self._track_of(request.sampling, matcher, len(request.output_token_ids))
                self._tracks[request] = track
        except (RejectedError, AccidentError) as error:
            self.refuse(request, str(error))
            return False
        new = request.output_token_ids[track.num_followed :]
        track.num_followed += len(new)
        return track.matcher is None or not new or self._consume(request, track.matcher, new)

    def _consume(self, request: Request, matcher: LLMatcher, token_ids: list[int]) -> bool:
        if matcher.consume_tokens(token_ids):
            return True
        self.refuse(request, f"the grammar can't be followed any further: {fault_of(matcher)}")
        return False

    def _narrow(self, words: Words, request: Request) -> None:
        """Takes from a row that grammars have filled what the request's other rules forbid."""
        track, sampling = self._tracks[request], request.sampling
        if track.matcher is not None and track.matcher.is_error():
            self.refuse(request, f"the grammar can't be followed any further: {fault_of(track.matcher)}")
        if track.allowed is not None:
            words &= track.allowed
        for bad in sampling.bad_words:
            if _ends_with(request.output_token_ids, bad[:-1]):
                forbid(words, bad[-1])


def _ends_with(token_ids: Sequence[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == end
