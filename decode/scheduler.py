"""Which requests take part in the next step. Knows no torch, socket or clock: time comes in as an argument.

The life of a request here:

1. `add`: checked by the worker, queued, its offer expected (WAITING).
2. `offered`: prefill has admitted it, so its KV will come without waiting for anybody else (OFFERED).
3. In the order of the queue, blocks for its prompt are reserved and its KV is granted (RECEIVING), except for the part
   that the pool still holds from an earlier request. Its gateway is told, as from here on it isn't turned away any
   more. No room: it waits for a bounded time, and prefill holds its KV.
4. `reception_ended`: the KV is in the pool and the first token known; it takes part in the next step (RUNNING).
5. Each step gives each running request one token, until a stop rule ends it (ENDED). It takes a block only when it
   needs one.
6. When no block is free, the request that stands last in the order gives its blocks to the one that needs one
   (PREEMPTED). As soon as there is room it comes back, before all that is new, and what the pool has lost of its KV is
   computed here, in chunks beside the other requests' tokens:

    |<- one token of each that has its KV ->|<- chunks of those that were preempted, in order ->|
                                            |<--------- max_num_prefill_tokens at most -------->|

The first in the order never gives blocks away, so it always gets on, and then the next one is the first. One that
needs a block and has nobody behind it keeps its own and sits steps out: whoever has the rest is done some day.

Room is kept for none that prefill has not admitted: with both pools nearly full, each side could wait for what the
other keeps for somebody else.
"""

import bisect
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from msgspec import structs

from engine.block_pool import BlockPool
from engine.request import Outgoing, Request, RequestState, ScheduledRow
from engine.request_book import QueueRules, RequestBook, fits_beside
from engine.stopping import finish_reason
from kvtransfer.incoming import KvOffered, PeerId, ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import EndReason, LifetimeEvent, Load, RequestEnd, RequestKey, RequestOutput


@dataclass(frozen=True)
class DecodeLimits:
    """Tokens a step that are computed again, requests that hold blocks at once, tokens a request; seconds to wait for
    room (`lease`), and for prefill's offer."""

    max_num_prefill_tokens: int
    max_num_seqs: int
    max_model_len: int
    lease: float
    offer_timeout: float


@dataclass(eq=False, kw_only=True)
class DecodeJob(Request):
    """A request with where its KV comes from. `num_reported`: output tokens that the gateway was told of."""

    peer: PeerId
    num_reported: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_reported = self.num_resumed


@dataclass(frozen=True)
class ExpectOffer:
    """Say when the request's KV is offered; answered in the end by `reception_ended`."""

    request: DecodeJob


@dataclass(frozen=True)
class GrantKv:
    """Blocks are reserved: take the request's KV."""

    request: DecodeJob


@dataclass(frozen=True)
class CloseReception:
    """Stop taking KV; answered by `reception_ended`."""

    key: RequestKey
    reason: str


ReceptionCommand = ExpectOffer | GrantKv | CloseReception


class DecodeScheduler(RequestBook[DecodeJob, ReceptionCommand]):
    """Owns all requests of a decode worker. What it decides is drained by `take_outputs` and `take_commands`."""

    def __init__(
        self, pool: BlockPool, rules: QueueRules, limits: DecodeLimits, eos_token_ids: AbstractSet[int]
    ) -> None:
        super().__init__(pool, rules)
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._preempted: list[DecodeJob] = []  # in the order of their places
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._preempted)

    def load(self) -> Load:
        return structs.replace(super().load(), num_preemptions=self._num_preemptions)

    def offered(self, event: KvOffered, now: float) -> None:
        """Prefill holds blocks for the request; said once."""
        request = self._requests.get(event.key)
        if request is None or request.state is not RequestState.WAITING:
            return
        request.record(LifetimeEvent.OFFERED, now)
        request.move(RequestState.OFFERED)
        self._reserve(now)

    def reception_ended(self, event: ReceptionEnded, now: float) -> None:
        """The receiver will not touch the request's blocks again; ARRIVED brings the first token."""
        request = self._requests.get(event.key)
        if request is None:
            return
        request.lent = False
        if request.state is RequestState.CLOSING:
            self._release(request, now)
        elif event.outcome is not ReceptionOutcome.ARRIVED or event.first_token_id is None:
            self._end(request, EndReason.FAILED, now, f"the KV did not arrive: {event.reason or event.outcome.value}")
        else:
            if event.first_frame_at is not None:
                request.record(LifetimeEvent.FIRST_FRAME, event.first_frame_at)
            self._start_running(request, event.first_token_id, now)

    def expire(self, now: float) -> None:
        """Ends requests that have waited too long for their offer, or for room."""
        for request in list(self._waiting):
            if request.state is RequestState.WAITING:
                self._expire_unoffered(request, now)
            elif request.state is RequestState.OFFERED:  # not, if an earlier one's end has just made room for it
                self._expire_without_room(request, now)

    def _expire_unoffered(self, request: DecodeJob, now: float) -> None:
        limit = self._limits.offer_timeout
        if now - request.events[LifetimeEvent.RECEIVED] > limit:
            self._end(request, EndReason.FAILED, now, f"the prefill worker has not offered the KV for {limit:g} s")

    def _expire_without_room(self, request: DecodeJob, now: float) -> None:
        limit = self._limits.lease
        if now - request.events[LifetimeEvent.OFFERED] > limit:
            self._end(request, EndReason.OVERLOADED, now, f"no room in the KV pool for {limit:g} s")

    # --- the step

    def schedule(self, now: float) -> list[ScheduledRow]:
        """The next step's rows; empty if there is nothing to do."""
        self._readmit()
        rows = [*self._token_rows(), *self._chunk_rows()]
        for row in rows:
            row.request.record(LifetimeEvent.RUNNING, now)
        return rows

    def _token_rows(self) -> list[ScheduledRow]:
        """One token of each request that has the KV of all others, and a block for this one."""
        rows = []
        for request in list(self._running):
            if request.state is RequestState.RUNNING and request.num_uncomputed == 1 and self._grow(request):
                rows.append(ScheduledRow(request, request.num_computed, 1))
        return rows

    def _chunk_rows(self) -> list[ScheduledRow]:
        """A bounded number of tokens of requests that are computed again; they have all blocks they need."""
        rows, budget = [], self._limits.max_num_prefill_tokens
        for request in self._running:
            count = min(request.num_uncomputed, budget)
            if request.num_uncomputed > 1 and count > 0:
                rows.append(ScheduledRow(request, request.num_computed, count))
                budget -= count
        return rows

    def complete(self, rows: Sequence[ScheduledRow], sampled: Sequence[int | None], now: float) -> None:
        """Books a step: each row's sampled token, and ends."""
        for row, token_id in zip(rows, sampled, strict=True):
            assert isinstance(row.request, DecodeJob), row.request
            assert (token_id is not None) == row.samples, f"row of {row.request.key} sampled {token_id}"
            self._computed(row.request, row.stop)
            if token_id is None:
                continue
            self._append(row.request, token_id, now)
            if row.request.num_reported < len(row.request.output_token_ids):
                self._say(row.request, None)

    def _start_running(self, request: DecodeJob, first_token_id: int, now: float) -> None:
        request.record(LifetimeEvent.SPLICED, now)
        self._run(request)
        self._computed(request, request.num_prefill)
        self._append(request, first_token_id, now)

    def _append(self, request: DecodeJob, token_id: int, now: float) -> None:
        request.output_token_ids.append(token_id)
        reason = finish_reason(request, self._eos_token_ids, self._limits.max_model_len)
        if reason is not None:
            self._end(request, reason, now)

    def _reserve(self, now: float) -> None:
        for request in [request for request in self._waiting if request.state is RequestState.OFFERED]:
            num_running, cached = self.num_running, self._cached_blocks(request, request.num_prefill)
            if self._preempted or num_running >= self._limits.max_num_seqs:
                return
            if not fits_beside(self._pool, request.num_prefill, cached, num_running):
                return
            self._waiting.remove(request)
            self._take_blocks(request, request.num_prefill, cached)
            request.move(RequestState.RECEIVING)
            request.record(LifetimeEvent.RESERVED, now)
            self._commands.append(GrantKv(request))
            self._say(request, None)

    # --- blocks run dry

    def _grow(self, request: DecodeJob) -> bool:
        """Whether the request has a block for its next token now; one behind it in the order may have lost its own."""
        if request.num_tokens <= len(request.block_ids) * self._pool.block_size:
            return True
        while self._pool.num_free == 0:
            if self._running[-1] is request:
                return False
            self._preempt(self._running[-1])
        request.block_ids += self._pool.allocate(1, owner=request.key)
        return True

    def _preempt(self, request: DecodeJob) -> None:
        self._running.remove(request)
        self._give_back(request)
        request.num_computed = 0
        request.move(RequestState.PREEMPTED)
        bisect.insort(self._preempted, request, key=self._place)
        self._num_preemptions += 1

    def _readmit(self) -> None:
        while self._preempted:
            request = self._preempted[0]
            cached = self._cached_blocks(request, request.num_tokens - 1)
            if not fits_beside(self._pool, request.num_tokens, cached, self.num_running):
                return
            self._preempted.pop(0)
            self._take_blocks(request, request.num_tokens, cached)
            self._run(request)

    def _unlist(self, request: DecodeJob) -> None:
        if request.state is RequestState.PREEMPTED:
            self._preempted.remove(request)
        super()._unlist(request)

    # --- queue, end, word

    def _queued(self, request: DecodeJob, now: float) -> None:
        request.lent = True
        self._commands.append(ExpectOffer(request))

    def _end(self, request: DecodeJob, reason: EndReason, now: float, message: str = "") -> None:
        super()._end(request, reason, now, message)
        self._reserve(now)  # who leaves the queue may have stood in the way of others

    def _release(self, request: DecodeJob, now: float) -> None:
        super()._release(request, now)
        self._reserve(now)

    def _stop_transfer(self, request: DecodeJob, reason: EndReason, message: str) -> ReceptionCommand:
        return CloseReception(request.key, message or reason.value)

    def _say(self, request: DecodeJob, end: RequestEnd | None) -> None:
        """Tells the gateway what is new. The first token is said again: prefill's word may have been lost with it."""
        start, request.num_reported = request.num_reported, len(request.output_token_ids)
        output = RequestOutput(
            request_id=request.spec.request_id,
            attempt=request.spec.attempt,
            start=start,
            token_ids=tuple(request.output_token_ids[start:]),
            end=end,
            events=request.readings() if end is not None or request.state is RequestState.RECEIVING else {},
        )
        self._outputs.append(Outgoing(request.gateway, output))
