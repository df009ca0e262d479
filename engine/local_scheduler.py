"""Which requests take part in the next step where one process computes all: no hand-over and nobody to wait for. Knows
no torch, socket or clock.

The life of a request here:

1. `add`: checked by the caller, queued (WAITING).
2. In the order of the queue it gets blocks for its prompt, as soon as there is room (RUNNING); what the pool still
   holds of it from an earlier request is not computed again.
3. Its prompt is computed in chunks beside the others' tokens, then each step gives it one token, until a stop rule ends
   it (ENDED). It takes a block only when it needs one.
4. When no block is free, another one may lose its own (PREEMPTED): see `engine/growing_book.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from engine.growing_book import GrowingBook, GrowingJob
from engine.request import ScheduledRow
from kvtransfer.codec import RequestKey
from kvtransfer.request_parts import Drawn, EndReason, LifetimeEvent


@dataclass(frozen=True)
class LocalLimits:
    """Prompt tokens a step, requests that hold blocks at once, tokens a request."""

    max_num_prefill_tokens: int
    max_num_seqs: int
    max_model_len: int


class LocalScheduler(GrowingBook[GrowingJob, NoReturn, LocalLimits]):
    """Owns all requests of one process. What they have to say is drained by `take_outputs`."""

    def expire(self, now: float) -> None:
        """Nobody waits for another process, and for room as long as it takes."""

    def schedule(self, now: float) -> list[ScheduledRow]:
        """The next step's rows; empty if there is nothing to do."""
        self._readmit()
        self._admit_in_order(now)
        return self._step_rows(self._limits.max_num_prefill_tokens, 1, now)

    def _sampled(self, request: GrowingJob, drawn: Mapping[RequestKey, Drawn], now: float) -> None:
        request.append(drawn[request.key])
        request.record(LifetimeEvent.FIRST_TOKEN, now)
        reason = self._finish_reason(request)
        if reason is None:
            self._say(request, None)
        else:
            self._end(request, reason, now)

    def _admit_in_order(self, now: float) -> None:
        """Blocks for those that wait; who does not fit holds up all behind it, and who was preempted goes first."""
        while self._waiting and not self._preempted and self.num_running < self._limits.max_num_seqs:
            request = self._waiting[0]
            cached = self._blocks.find_cached(request, request.num_prefill - 1)
            if not self._fits(request, request.num_prefill, cached):
                return
            self._waiting.pop(0)
            self._blocks.take_first(request, request.num_prefill, cached)
            request.record(LifetimeEvent.RESERVED, now)
            self._run(request)

    def _stop_transfer(self, request: GrowingJob, reason: EndReason, message: str) -> NoReturn:
        raise AssertionError(f"{request.key} is lent to a transfer, and there is none")
