"""One request in flight: its two workers, its merged tokens, and the bounded way to its consumer."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from gateway.backend import (
    BackendError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    TokenDelta,
)
from gateway.merge import InconsistentOutputError, TokenMerge
from gateway.observer import Phases, RequestOutcome
from gateway.worker import Worker
from kvtransfer.messages import EndReason, LifetimeEvent, RequestEnd, RequestKey, RequestOutput, RequestSpec, Role

_FINISHES = frozenset({EndReason.STOP, EndReason.LENGTH})


class TokenStream:
    """From the control loop to one consumer: at most `limit` tokens wait; pushing never blocks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deltas: deque[TokenDelta] = deque()
        self._num_tokens = 0
        self._error: BackendError | None = None
        self._changed = asyncio.Event()

    def push(self, delta: TokenDelta) -> bool:
        """Queues new tokens; False if there is no room for them."""
        if self._num_tokens + len(delta.token_ids) > self._limit:
            return False
        self._deltas.append(delta)
        self._num_tokens += len(delta.token_ids)
        self._changed.set()
        return True

    def fail(self, error: BackendError) -> None:
        """What is queued still reaches the consumer, then the error does."""
        assert self._error is None, f"failed twice: {self._error}, then {error}"
        self._error = error
        self._changed.set()

    async def get(self) -> TokenDelta:
        """The next tokens; raises the BackendError that ended the request."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        delta = self._deltas.popleft()
        self._num_tokens -= len(delta.token_ids)
        return delta


@dataclass(eq=False)
class Leg:
    """One worker's part of a request. `active`: it has the request and has not ended it, so it is owed a Cancel."""

    worker_id: str
    generation: str
    role: Role
    active: bool = False
    events: dict[LifetimeEvent, float] = field(default_factory=dict)

    @classmethod
    def on(cls, worker: Worker) -> "Leg":
        return cls(worker.worker_id, worker.generation, worker.role)

    def note(self, output: RequestOutput) -> None:
        """Takes the output's readings."""
        self.events.update(output.events)


@dataclass(frozen=True)
class Deadlines:
    """Moments on the gateway's clock, seconds, by which the first token and the end must have come."""

    first_token_at: float
    end_at: float


@dataclass(eq=False)
class Flight:
    """A dispatched request. `decode` is None if the first token is also the last. `arrived_at` and `started_at`, when
    the call came and when it was dispatched, are on the gateway's clock."""

    spec: RequestSpec
    prefill: Leg
    decode: Leg | None
    merge: TokenMerge
    stream: TokenStream
    arrived_at: float
    started_at: float
    deadlines: Deadlines
    _finish: EndReason | None = field(default=None, init=False)
    _num_final: int | None = field(
        default=None, init=False
    )  # output tokens in all, once a worker has finished the request

    @property
    def key(self) -> RequestKey:
        return (self.spec.request_id, self.spec.attempt)

    @property
    def legs(self) -> tuple[Leg, ...]:
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)

    def leg_on(self, worker: Worker) -> Leg | None:
        """This worker's part, if it has one that is not over."""
        for leg in self.legs:
            if leg.active and (leg.worker_id, leg.generation) == (worker.worker_id, worker.generation):
                return leg
        return None

    def needs(self, leg: Leg) -> bool:
        """Whether the request fails without this worker. Once decode speaks it has all of the KV, so prefill may go."""
        return leg is not self.prefill or self.merge.length == 0 or not self.merge.has_spoken(Role.DECODE)

    def receive(self, leg: Leg, output: RequestOutput) -> TokenDelta | None:
        """Takes a worker's output and returns what the consumer gets of it, if anything.

        Raises BackendError if the request has failed.
        """
        leg.note(output)
        if output.end is not None:
            leg.active = False
            self._on_end(leg, output, output.end)
        fresh = self.merge.add(leg.role, output.start, output.token_ids)
        finish = self._reached_finish()
        return TokenDelta(fresh, finish) if fresh or finish is not None else None

    def _on_end(self, leg: Leg, output: RequestOutput, end: RequestEnd) -> None:
        if end.reason in _FINISHES:
            self._finish, self._num_final = end.reason, output.start + len(output.token_ids)
        elif end.reason is EndReason.HANDED_OVER and leg is self.prefill and self.decode is not None:
            return
        elif self.needs(leg):
            raise _error_of(end)

    def _reached_finish(self) -> EndReason | None:
        """The finish, once all tokens before it are known: decode may end before prefill's token is here."""
        if self._num_final is None or self.merge.length < self._num_final:
            return None
        if self.merge.length > self._num_final:
            raise InconsistentOutputError("output tokens came after the end")
        return self._finish

    def overdue(self, now: float) -> DeadlineExceededError | None:
        """The error of a request that is past a deadline."""
        if now >= self.deadlines.end_at:
            return DeadlineExceededError("the request took longer than this server allows")
        if self.merge.length == 0 and now >= self.deadlines.first_token_at:
            return DeadlineExceededError("no token came within the time this server allows")
        return None

    def outcome(self, now: float, finish: EndReason | None, error: BackendError | None) -> RequestOutcome:
        phases = Phases.of(
            self.started_at - self.arrived_at,
            now - self.arrived_at,
            self.prefill.events,
            {} if self.decode is None else self.decode.events,
            is_finished=finish is not None,
        )
        return RequestOutcome(self.spec.request_id, finish, error, phases)


def _error_of(end: RequestEnd) -> BackendError:
    """A worker's end as the client's error. Only a rejection's text is the worker's: it is written for the client."""
    if end.reason is EndReason.REJECTED:
        return InvalidRequestError(end.message or "the request can not be served by this model")
    if end.reason is EndReason.OVERLOADED:
        return OverloadedError("the workers are at their limit; try again later")
    return RequestFailedError("a worker could not finish the request")
