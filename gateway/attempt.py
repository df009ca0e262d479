"""One try at a request: its workers, and what they have said so far."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from gateway.backend import BackendError, InvalidRequestError, OverloadedError, RequestFailedError
from gateway.failover import RetryReason, SetbackError
from gateway.merge import InconsistentOutputError, TokenMerge
from gateway.modes import Mode
from gateway.router import Route
from gateway.worker import Worker, WorkerRef
from kvtransfer.codec import RequestKey
from kvtransfer.messages import DecodeRequest, DecodeTarget, PrefillRequest, PrefillSource
from kvtransfer.request_parts import (
    EndReason,
    LifetimeEvent,
    PromptLogprobs,
    RequestEnd,
    RequestOutput,
    RequestSpec,
    Sibling,
    TokenLogprob,
)
from kvtransfer.worker_facts import LeaveCause, Role

_PLANNED: Final[Mapping[LeaveCause, RetryReason]] = MappingProxyType(
    {LeaveCause.SHUTDOWN: RetryReason.WORKER_STOPPED, LeaveCause.ROLE_SWITCH: RetryReason.ROLE_SWITCHED}
)
_FINISHES = frozenset({EndReason.STOP, EndReason.LENGTH})


@dataclass(eq=False)
class Leg:
    """One worker's part of an attempt. `active`: it has the request and has not ended it, so it is owed a Cancel."""

    worker_id: str
    generation: str
    role: Role
    active: bool = False
    events: dict[LifetimeEvent, float] = field(default_factory=dict)

    @classmethod
    def on(cls, worker: Worker) -> "Leg":
        return cls(worker.worker_id, worker.generation, worker.role)

    @property
    def ref(self) -> WorkerRef:
        return (self.worker_id, self.generation)


@dataclass(eq=False)
class Attempt:
    """(request, attempt) on its workers. `prefill` is None if decode computes the prompt, `decode` is None if prefill's
    token is the last. `started_at`: seconds on the gateway's clock."""

    spec: RequestSpec
    prefill: Leg | None
    decode: Leg | None
    merge: TokenMerge
    started_at: float
    num_cached: int = field(default=0, init=False)  # prompt tokens that a worker found in its prefix cache
    _scores: list[TokenLogprob] = field(default_factory=list, init=False)
    _num_scored: int = field(default=0, init=False)
    _finish: EndReason | None = field(default=None, init=False)
    _num_final: int | None = field(default=None, init=False)  # output tokens in all, once a worker has finished

    @property
    def key(self) -> RequestKey:
        return (self.spec.request_id, self.spec.attempt)

    @property
    def legs(self) -> tuple[Leg, ...]:
        return tuple(leg for leg in (self.prefill, self.decode) if leg is not None)

    @property
    def mode(self) -> Mode:
        """Where the prompt is computed; never auto."""
        return Mode.LOCAL if self.prefill is None else Mode.DISAGGREGATED

    @property
    def active_legs(self) -> tuple[Leg, ...]:
        return tuple(leg for leg in self.legs if leg.active)

    @property
    def has_room(self) -> bool:
        """Whether no worker can turn the request away any more."""
        return self.decode is None or LifetimeEvent.RESERVED in self.decode.events or self.merge.has_spoken(Role.DECODE)

    @property
    def has_scores(self) -> bool:
        """Whether all is known of the prompt's tokens that was asked for."""
        return self.spec.sampling.num_prompt_logprobs is None or self._num_scored == self._num_to_score

    @property
    def finish(self) -> EndReason | None:
        """Set once all is known: decode may end before prefill's token is here."""
        if self._num_final is None or self.merge.length < self._num_final or not self.has_scores:
            return None
        return self._finish

    def take_scores(self) -> tuple[TokenLogprob, ...] | None:
        """How likely the prompt's tokens were, if that was asked for; not to be taken twice."""
        if self.spec.sampling.num_prompt_logprobs is None:
            return None
        taken, self._scores = tuple(self._scores), []
        return taken

    def leg_of(self, role: Role) -> Leg:
        """The part of a worker that it has."""
        return next(leg for leg in self.legs if leg.role is role)

    def leg_on(self, worker: Worker) -> Leg | None:
        """This worker's part, if it has one that is not over."""
        return next((leg for leg in self.active_legs if leg.ref == worker.ref), None)

    def needs(self, leg: Leg) -> bool:
        """Whether it can't go on without this worker. Once decode speaks it has all of the KV, so prefill may go, if it
        has said how likely the prompt was."""
        is_over = self.merge.num_new > 0 and self.merge.has_spoken(Role.DECODE) and self.has_scores
        return leg is not self.prefill or not is_over

    def receive(self, leg: Leg, output: RequestOutput) -> None:
        """Takes a worker's output. Raises SetbackError if the attempt is over, BackendError if the request is."""
        leg.events.update(output.events)
        self.num_cached = max(self.num_cached, output.num_cached)
        leg.active = leg.active and output.end is None
        if output.prompt_logprobs is not None:
            self._add_scores(leg, output.prompt_logprobs)
        self.merge.add(leg.role, output.start, output.token_ids, output.logprobs)
        if output.token_ids and leg is self._scorer and not self.has_scores:
            raise InconsistentOutputError("log probabilities of the prompt are missing")
        if output.end is not None:
            self._on_end(leg, output, output.end)
        if self._num_final is not None and self.merge.length > self._num_final:
            raise InconsistentOutputError("output tokens came after the end")

    def loss_of(self, leg: Leg, cause: LeaveCause) -> SetbackError:
        """What it means that a worker which is needed has gone."""
        lost = RetryReason.PREFILL_LOST if leg is self.prefill else RetryReason.DECODE_LOST
        reason = _PLANNED.get(cause, lost)
        what = "was lost" if reason is lost else "left"
        error = RequestFailedError(f"the {leg.role.value} worker of the request {what}")
        return SetbackError(reason, error, [leg.ref])

    def requests(
        self, route: Route, siblings: tuple[Sibling, ...] = ()
    ) -> Iterator[tuple[Leg, PrefillRequest | DecodeRequest]]:
        """What each worker is told, on the route that the attempt was made for; `siblings` are led by this one."""
        if self.prefill is not None:
            target = None if route.decode is None else _target(route.decode)
            yield self.prefill, PrefillRequest(self.spec, target, siblings=siblings)
        if self.decode is not None:
            source = None if self.prefill is None else PrefillSource(*self.prefill.ref)
            yield self.decode, DecodeRequest(self.spec, source, siblings=siblings)

    @property
    def _scorer(self) -> Leg | None:
        """Whoever computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def _num_to_score(self) -> int:
        return len(self.spec.prompt_token_ids) - 1

    def _add_scores(self, leg: Leg, scores: PromptLogprobs) -> None:
        """The next ones, in order and without gaps. Raises InconsistentOutputError."""
        is_asked = self.spec.sampling.num_prompt_logprobs is not None and leg is self._scorer
        num_known = self._num_scored + len(scores.tokens)
        if not is_asked or scores.start != self._num_scored + 1 or num_known > self._num_to_score:
            raise InconsistentOutputError("log probabilities of the prompt out of order, or not asked for")
        self._scores += scores.tokens
        self._num_scored = num_known

    def _on_end(self, leg: Leg, output: RequestOutput, end: RequestEnd) -> None:
        if end.reason in _FINISHES:
            self._finish, self._num_final = end.reason, output.start + len(output.token_ids)
        elif end.reason is EndReason.HANDED_OVER and leg is self.prefill and self.decode is not None:
            return
        elif self.needs(leg):
            raise self._trouble(leg, end)

    def _trouble(self, leg: Leg, end: RequestEnd) -> SetbackError | BackendError:
        """A worker's end as the request's. Only a rejection's text is the worker's: it is written for the client.

        Whoever says that it failed may have been failed by the other, so both are suspects.
        """
        if end.reason is EndReason.REJECTED:
            return InvalidRequestError(end.message or "the request can not be served by this model")
        if end.reason is EndReason.OVERLOADED:
            busy = OverloadedError("the workers are at their limit; try again later")
            return SetbackError(RetryReason.OVERLOADED, busy, [leg.ref])
        error = RequestFailedError("a worker could not finish the request")
        if end.reason is EndReason.HANDED_OVER:  # to nobody: a worker that breaks the protocol would do so again
            return error
        told = f"{leg.role.value} said {end.message!r}" if end.message else None
        return SetbackError(RetryReason.FAILED, error, [leg.ref for leg in self.legs], told)


def _target(decode: Worker) -> DecodeTarget:
    kv_endpoint = decode.hello.kv_endpoint
    assert kv_endpoint is not None, f"decode worker {decode.worker_id} was let in without a KV endpoint"
    return DecodeTarget(*decode.ref, kv_endpoint)
