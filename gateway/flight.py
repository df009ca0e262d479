"""One request in flight: a sequence of attempts that make one stream of tokens without a gap or a repeat.

      +----------------------------------------+
      |                                        v
    WAITING -----------> HELD ----------> STREAMING ----> OVER     WAITING and HELD may be OVER too: an error, or the
      ^                   |                    |                   client has left
      +-------------------+--------------------+
                    the attempt is lost

What the client has is never lost: the next attempt gets prompt and output so far, and goes on behind them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from msgspec import structs

from gateway.attempt import Attempt, Leg
from gateway.backend import BackendError, DeadlineExceededError, TokenDelta, Traits
from gateway.failover import Failover
from gateway.held_prefixes import BlockChain
from gateway.merge import TokenMerge
from gateway.modes import Mode
from gateway.observer import Phases, RequestOutcome
from gateway.router import Route
from gateway.stream import TokenStream
from kvtransfer.request_parts import EndReason, RequestOutput, RequestSpec, SamplingParams


class FlightState(Enum):
    """Where a request is."""

    WAITING = "waiting"  # no worker has it: it has not begun, or its last attempt is over
    HELD = "held"  # workers have it; nothing goes to the client before decode has room, so an overload is still a 429
    STREAMING = "streaming"  # tokens go to the client as they come
    OVER = "over"  # the last word is said


_MOVES: Final[Mapping[FlightState, frozenset[FlightState]]] = MappingProxyType(
    {
        FlightState.WAITING: frozenset({FlightState.HELD, FlightState.STREAMING, FlightState.OVER}),
        FlightState.HELD: frozenset({FlightState.STREAMING, FlightState.WAITING, FlightState.OVER}),
        FlightState.STREAMING: frozenset({FlightState.WAITING, FlightState.OVER}),
        FlightState.OVER: frozenset(),
    }
)


class IllegalFlightMoveError(AssertionError):
    """Our own bug: a request was moved against the table."""


@dataclass(frozen=True)
class Deadlines:
    """Moments on the gateway's clock, seconds, by which the first token and the end must have come."""

    first_token_at: float
    end_at: float


@dataclass(eq=False)
class Flight:
    """A request from its admission to its last word. `arrived_at`, when the call came, is on the gateway's clock;
    `max_early`: decode's tokens that are kept while prefill's is not known. `mode`: the one that was asked for."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    traits: Traits
    stream: TokenStream
    failover: Failover
    arrived_at: float
    deadlines: Deadlines
    max_early: int
    mode: Mode = Mode.AUTO
    chain: BlockChain = field(default_factory=BlockChain)
    state: FlightState = field(default=FlightState.WAITING, init=False)
    attempt: Attempt | None = field(default=None, init=False)
    first_mode: Mode | None = field(default=None, init=False)  # of the first attempt
    num_streamed: int = field(default=0, init=False)
    _first_sent_at: float = field(default=0.0, init=False)
    _first_known_at: float | None = field(default=None, init=False)
    _handoff_gap_s: float | None = field(default=None, init=False)

    @property
    def tokens(self) -> Sequence[int]:
        """Output so far, also what the client does not have yet."""
        return () if self.attempt is None else self.attempt.merge.tokens

    @property
    def known_tokens(self) -> Sequence[int]:
        """The prompt and the output so far."""
        return [*self.prompt_token_ids, *self.tokens] if self.tokens else self.prompt_token_ids

    @property
    def owes_scores(self) -> bool:
        """Whether the client is still to be told how likely its prompt was: with its first tokens."""
        return self.sampling.num_prompt_logprobs is not None and self.num_streamed == 0

    @property
    def kept_tokens(self) -> Sequence[int]:
        """What of the output the next attempt goes on from. One that has to score the prompt begins anew: the client
        has nothing yet, and the last attempt may have had all tokens."""
        return () if self.owes_scores else self.tokens

    @property
    def num_attempts(self) -> int:
        return 0 if self.attempt is None else self.attempt.spec.attempt + 1

    @property
    def num_total(self) -> int:
        """Tokens of the prompt and of the longest output."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def needs_decode(self) -> bool:
        """Whether more than one token is missing."""
        return self.sampling.max_tokens - len(self.kept_tokens) > 1

    @property
    def active_legs(self) -> tuple[Leg, ...]:
        return () if self.attempt is None else self.attempt.active_legs

    def move(self, state: FlightState) -> None:
        """The only way to change `state`; raises IllegalFlightMoveError off the table."""
        if state not in _MOVES[self.state]:
            raise IllegalFlightMoveError(f"request {self.request_id}: {self.state.name} -> {state.name}")
        self.state = state

    def begin(self, route: Route, now: float) -> Attempt:
        """The next attempt, on these workers, who are still to be told."""
        spec = self._next_spec()
        untaken = () if self.attempt is None or self.owes_scores else self.attempt.merge.take_logprobs()
        self.attempt = Attempt(
            spec=spec,
            prefill=None if route.prefill is None else Leg.on(route.prefill),
            decode=None if route.decode is None else Leg.on(route.decode),
            merge=TokenMerge(
                self.sampling.max_tokens,
                self.max_early,
                spec.output_token_ids,
                is_decode_alone=route.prefill is None,
                with_logprobs=spec.sampling.num_logprobs is not None,
                untaken=untaken,
            ),
            started_at=now,
        )
        if spec.attempt == 0:
            self._first_sent_at, self.first_mode = now, self.attempt.mode
        self._first_known_at = None
        may_be_turned_away = self.num_streamed == 0 and route.decode is not None
        self.move(FlightState.HELD if may_be_turned_away else FlightState.STREAMING)
        return self.attempt

    def receive(self, leg: Leg, output: RequestOutput, now: float) -> TokenDelta | None:
        """Takes a worker's output and returns what the consumer gets of it, if anything.

        Raises SetbackError if the attempt is over, BackendError if the request is.
        """
        assert self.attempt is not None, f"request {self.request_id} has not begun"
        self.attempt.receive(leg, output)
        self._note_handoff(now)
        finish = self.attempt.finish
        if self.state is FlightState.HELD and self.attempt.has_room:
            self.move(FlightState.STREAMING)
        if finish is None and (self.state is FlightState.HELD or not self.attempt.has_scores):
            return None
        fresh = tuple(self.tokens[self.num_streamed :])
        return self._delta(fresh, finish) if fresh or finish is not None else None

    def _delta(self, fresh: tuple[int, ...], finish: EndReason | None) -> TokenDelta:
        """What the consumer gets now; the first one has more to it."""
        assert self.attempt is not None, f"request {self.request_id} has not begun"
        is_first = self.num_streamed == 0
        self.num_streamed += len(fresh)
        return TokenDelta(
            fresh,
            finish,
            num_cached=self.attempt.num_cached if is_first else 0,
            logprobs=self.attempt.merge.take_logprobs(),
            prompt_logprobs=self.attempt.take_scores() if is_first else None,
        )

    def overdue(self, now: float) -> BackendError | None:
        """The error of a request that is past a deadline."""
        if now >= self.deadlines.end_at:
            return DeadlineExceededError("the request took longer than this server allows")
        if self.num_streamed == 0 and now >= self.deadlines.first_token_at:
            return DeadlineExceededError("no token came within the time this server allows")
        return self.failover.overdue(now) if self.state is FlightState.WAITING else None

    def outcome(self, now: float, finish: EndReason | None, error: BackendError | None) -> RequestOutcome:
        """What became of it; the phases are those of the last attempt, and what came before is one of its own."""
        assert self.attempt is not None, f"request {self.request_id} has not begun"
        phases = Phases.of(
            self._first_sent_at - self.arrived_at,
            now - self.arrived_at,
            None if self.attempt.prefill is None else self.attempt.prefill.events,
            {} if self.attempt.decode is None else self.attempt.decode.events,
            is_finished=finish is not None,
            retry_s=self.attempt.started_at - self._first_sent_at if self.attempt.spec.attempt else None,
        )
        return RequestOutcome(self.request_id, finish, error, phases, self._handoff_gap_s, self.attempt.mode)

    def _next_spec(self) -> RequestSpec:
        sampling = self.sampling if self.owes_scores else structs.replace(self.sampling, num_prompt_logprobs=None)
        return RequestSpec(
            request_id=self.request_id,
            attempt=self.num_attempts,
            prompt_token_ids=self.prompt_token_ids,
            sampling=sampling,
            output_token_ids=tuple(self.kept_tokens),
            cache_salt=self.traits.cache_salt,
            priority=self.traits.priority,
        )

    def _note_handoff(self, now: float) -> None:
        """The gap between tokens 0 and 1, if one attempt gave both: anything else is not a hand-over's time."""
        assert self.attempt is not None, f"request {self.request_id} has not begun"
        if self.attempt.mode is Mode.LOCAL:
            return
        if self.attempt.spec.output_token_ids or self._handoff_gap_s is not None or not self.tokens:
            return
        if self._first_known_at is None:
            self._first_known_at = now
        if len(self.tokens) > 1:
            self._handoff_gap_s = now - self._first_known_at
