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
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NoReturn

from engine.block_pool import BlockPool
from engine.growing_book import GrowingBook
from engine.request import Drawn, Outgoing, Request, ScheduledRow
from engine.request_book import QueueRules
from engine.stopping import finish_reason
from kvtransfer.messages import EndReason, LifetimeEvent, RequestEnd, RequestKey, RequestOutput


@dataclass(frozen=True)
class LocalLimits:
    """Prompt tokens a step, requests that hold blocks at once, tokens a request."""

    max_num_prefill_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(eq=False)
class LocalJob(Request):
    """A request that nobody else has a part in. `num_reported`: output tokens that its owner was told of."""

    num_reported: int = field(init=False, default=0)


class LocalScheduler(GrowingBook[LocalJob, NoReturn]):
    """Owns all requests of one process. What they have to say is drained by `take_outputs`."""

    def __init__(
        self, pool: BlockPool, rules: QueueRules, limits: LocalLimits, eos_token_ids: AbstractSet[int]
    ) -> None:
        super().__init__(pool, rules)
        self._limits = limits
        self._eos_token_ids = eos_token_ids

    @property
    def max_members(self) -> int:
        """Groups do not come here: each prompt has one output."""
        return 1

    def expire(self, now: float) -> None:
        """Nobody waits for another process, and for room as long as it takes."""

    def schedule(self, now: float) -> list[ScheduledRow]:
        """The next step's rows; empty if there is nothing to do."""
        self._readmit()
        self._admit_in_order(now)
        rows = [*self._token_rows(), *self._chunk_rows(self._limits.max_num_prefill_tokens, max_partial=1)]
        for row in rows:
            row.request.record(LifetimeEvent.RUNNING, now)
        return rows

    def _sampled(self, request: LocalJob, drawn: Mapping[RequestKey, Drawn], now: float) -> None:
        request.append(drawn[request.key])
        request.record(LifetimeEvent.FIRST_TOKEN, now)
        reason = finish_reason(request, self._eos_token_ids, self._limits.max_model_len)
        if reason is None:
            self._say(request, None)
        else:
            self._end(request, reason, now)

    def _admit_in_order(self, now: float) -> None:
        """Blocks for those that wait; who does not fit holds up all behind it, and who was preempted goes first."""
        while self._waiting and not self._preempted and self.num_running < self._limits.max_num_seqs:
            request = self._waiting[0]
            cached = self._cached_blocks(request, request.num_prefill - 1)
            if not self._fits(request, request.num_prefill, cached):
                return
            self._waiting.pop(0)
            self._first_blocks(request, request.num_prefill, cached)
            request.record(LifetimeEvent.RESERVED, now)
            self._run(request)

    def _stop_transfer(self, request: LocalJob, reason: EndReason, message: str) -> NoReturn:
        raise AssertionError(f"{request.key} is lent to a transfer, and there is none")

    def _say(self, request: LocalJob, end: RequestEnd | None) -> None:
        start, request.num_reported = request.num_reported, len(request.output_token_ids)
        output = RequestOutput(
            request_id=request.spec.request_id,
            attempt=request.spec.attempt,
            start=start,
            token_ids=tuple(request.output_token_ids[start:]),
            end=end,
            num_cached=request.num_cached,
        )
        self._outputs.append(Outgoing(request.gateway, output))
