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
6. When no block is free, another one may lose its own (PREEMPTED), and what it loses is computed here, or kept in the
   host's memory meanwhile: see `engine/growing_book.py`.

A request without a prefill worker skips 2 to 4: it is admitted in the same order, and its prompt is computed here like
that of one that was preempted.

Further choices of a prompt follow the one that leads them up to 4, or to the end of the prompt: one KV comes, or is
computed, for all. With their first tokens they fork and are requests of their own.

Room is kept for none that prefill has not admitted: with both pools nearly full, each side could wait for what the
other keeps for somebody else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.growing_book import GrowingBook, GrowingJob
from engine.request import RequestState, ScheduledRow
from kvtransfer.codec import RequestKey
from kvtransfer.incoming import KvOffered, PeerId, ReceptionEnded, ReceptionOutcome
from kvtransfer.request_parts import Drawn, EndReason, LifetimeEvent


@dataclass(frozen=True)
class DecodeLimits:
    """Tokens a step of prompts that are computed here, requests that hold blocks at once, tokens a request. Seconds to
    wait: for room while prefill holds the KV (`lease`), for room with nobody waiting (`queue_timeout`), for prefill's
    offer. `max_num_partial_prefills`: prompts that a step computes in part."""

    max_num_prefill_tokens: int
    max_num_seqs: int
    max_model_len: int
    lease: float
    queue_timeout: float
    offer_timeout: float
    max_num_partial_prefills: int = 1


@dataclass(eq=False, kw_only=True)
class DecodeJob(GrowingJob):
    """A request with where its KV comes from (None: computed here)."""

    peer: PeerId | None

    @property
    def is_local(self) -> bool:
        return self.peer is None

    @property
    def scores_prompt(self) -> bool:
        """Only if its prompt is computed here to begin with: else prefill has told it all."""
        return self.is_local and super().scores_prompt


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


class DecodeScheduler(GrowingBook[DecodeJob, ReceptionCommand, DecodeLimits]):
    """Owns all requests of a decode worker. What it decides is drained by `take_outputs` and `take_commands`. The first
    token is said again: prefill's word may have been lost with it."""

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
            siblings = {(name, request.spec.attempt): drawn for name, drawn in event.siblings.items()}
            first = Drawn(event.first_token_id, event.first_logprob)
            self._start_running(request, {**siblings, request.key: first}, now)

    def expire(self, now: float) -> None:
        """Ends requests that have waited too long for their offer, or for room."""
        for request in list(self._waiting):
            if request.state is RequestState.WAITING:
                self._expire_unoffered(request, now)
            elif request.state is RequestState.OFFERED:  # not, if an earlier one's end has just made room for it
                self._expire_without_room(request, now)

    def _expire_unoffered(self, request: DecodeJob, now: float) -> None:
        waited = now - request.events[LifetimeEvent.RECEIVED]
        limit = self._limits.queue_timeout if request.is_local else self._limits.offer_timeout
        if waited > limit and request.is_local:
            self._end(request, EndReason.OVERLOADED, now, f"no room in the KV pool for {limit:g} s")
        elif waited > limit:
            self._end(request, EndReason.FAILED, now, f"the prefill worker has not offered the KV for {limit:g} s")

    def _expire_without_room(self, request: DecodeJob, now: float) -> None:
        limit = self._limits.lease
        if now - request.events[LifetimeEvent.OFFERED] > limit:
            self._end(request, EndReason.OVERLOADED, now, f"no room in the KV pool for {limit:g} s")

    # --- the step

    def schedule(self, now: float) -> list[ScheduledRow]:
        """The next step's rows; empty if there is nothing to do."""
        self._readmit()
        limits = self._limits
        return self._step_rows(limits.max_num_prefill_tokens, limits.max_num_partial_prefills, now)

    def _sampled(self, request: DecodeJob, drawn: Mapping[RequestKey, Drawn], now: float) -> None:
        for member in (request, *self._fork(request)):
            self._take(member, drawn.get(member.key), now)
            if member.num_reported < len(member.output_token_ids):
                self._say(member, None)

    def _start_running(self, request: DecodeJob, drawn: Mapping[RequestKey, Drawn], now: float) -> None:
        request.record(LifetimeEvent.SPLICED, now)
        self._run(request)
        self._blocks.note_computed(request, request.num_prefill)
        for member in (request, *self._fork(request)):
            self._take(member, drawn.get(member.key), now)

    def _take(self, member: DecodeJob, drawn: Drawn | None, now: float) -> None:
        """The next token of a request that may have just left its group."""
        if member.is_over:
            self._retire(member, now)
        elif drawn is None:
            self._end(member, EndReason.FAILED, now, "the prefill worker has sent no first token of it")
        else:
            self._append(member, drawn, now)

    def _retire(self, leader: DecodeJob, now: float) -> None:
        """Its group has the KV now, and nobody waits for itself."""
        self._unlist(leader)
        self._release(leader, now)

    def _append(self, request: DecodeJob, drawn: Drawn, now: float) -> None:
        request.append(drawn)
        if request.is_local:
            request.record(LifetimeEvent.FIRST_TOKEN, now)
        reason = self._finish_reason(request)
        if reason is not None:
            self._end(request, reason, now)

    def _reserve(self, now: float) -> None:
        """Room for those that may have it now, in order; who does not fit holds up all behind it."""
        for request in [request for request in self._waiting if _may_have_room(request)]:
            num_running = self.num_running + request.num_members
            if self._preempted or num_running > self._limits.max_num_seqs or not self._admit(request):
                return
            request.record(LifetimeEvent.RESERVED, now)
            if request.is_local:
                self._run(request)
            else:
                request.move(RequestState.RECEIVING)
                self._commands.append(GrantKv(request))
            for member in (request, *self._followers_of(request)):
                if not member.is_over:
                    self._say(member, None)

    def _admit(self, request: DecodeJob) -> bool:
        """Gives a waiting request its blocks, if they are to be had. What computes here computes one token at least."""
        num_tokens = request.num_prefill
        cached = self._blocks.find_cached(request, num_tokens - 1 if request.is_local else num_tokens)
        if not self._fits(request, num_tokens, cached):
            return False
        self._waiting.remove(request)
        self._blocks.take_first(request, num_tokens, cached)
        return True

    # --- queue, end, word

    def _queued(self, request: DecodeJob, now: float) -> None:
        if request.is_local:
            self._reserve(now)
            return
        request.lent = True
        self._commands.append(ExpectOffer(request))

    def _end(self, request: DecodeJob, reason: EndReason, now: float, message: str = "") -> None:
        super()._end(request, reason, now, message)
        if request.state is RequestState.CLOSING:  # it may have stood in the queue, in the way of others
            self._reserve(now)

    def _release(self, request: DecodeJob, now: float) -> None:
        super()._release(request, now)
        self._reserve(now)

    def _stop_transfer(self, request: DecodeJob, reason: EndReason, message: str) -> ReceptionCommand:
        return CloseReception(request.key, message or reason.value)


def _may_have_room(request: DecodeJob) -> bool:
    """Whether it waits for nothing but room."""
    return request.state is RequestState.OFFERED or (request.is_local and request.state is RequestState.WAITING)
