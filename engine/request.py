"""A request on one worker, its states, and the rows that a step computes for it. Knows no torch, socket or clock.

Positions of a request's tokens, and what has been computed of them (KV in the pool) at some moment:

    |<------ prompt_token_ids ------>|<-------- output_token_ids -------->|
    0                           num_prompt                            num_tokens
                                     |<- of earlier attempts ->|<- new -->|
                                                          num_prefill
    |<--------- computed --------->|
    0                        num_computed

What prefill computes and hands over is [0, num_prefill): the prompt, and what earlier attempts have generated.

Choices of one prompt that come together are a group. Until its first tokens are drawn there is one KV for all of it,
its leader's: the others have no blocks and follow (FOLLOWING). A leader may be over before its group is, because nobody
waits for it any more; then it goes on as their carrier, without another word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.codec import RequestKey
from kvtransfer.faults import Witness, unwatched
from kvtransfer.request_parts import Drawn, LifetimeEvent, RequestOutput, RequestSpec, SamplingParams, TokenLogprob


class RequestState(Enum):
    """Where a request is on this worker.

    prefill:   WAITING -> RUNNING -> HANDING_OVER -> ENDED
    decode:    WAITING -> OFFERED -> RECEIVING -> RUNNING -> ENDED      RUNNING -> PREEMPTED -> RUNNING
    colocated: WAITING -> RUNNING -> ENDED
    follower:  WAITING -> FOLLOWING -> ENDED, or on decode -> RUNNING as above

    A request that ends while a transfer thread may still touch its blocks goes through CLOSING.
    """

    WAITING = "waiting"  # no blocks yet
    FOLLOWING = "following"  # waits for the KV of its group's leader; no blocks of its own
    OFFERED = "offered"  # decode: prefill holds blocks for it; no blocks here yet
    RECEIVING = "receiving"  # decode: blocks reserved, KV arriving
    RUNNING = "running"  # takes part in steps
    PREEMPTED = "preempted"  # decode: its blocks were taken for an older one; it will be computed again, or copied back
    HANDING_OVER = "handing_over"  # prefill: computed, blocks held until decode has the KV
    CLOSING = "closing"  # the terminal word is given; blocks are still lent to a transfer
    ENDED = "ended"  # terminal; owns no blocks


_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {
            RequestState.FOLLOWING,
            RequestState.OFFERED,
            RequestState.RUNNING,
            RequestState.CLOSING,
            RequestState.ENDED,
        }
    ),
    RequestState.FOLLOWING: frozenset({RequestState.RUNNING, RequestState.ENDED}),
    RequestState.OFFERED: frozenset({RequestState.RECEIVING, RequestState.CLOSING, RequestState.ENDED}),
    RequestState.RECEIVING: frozenset({RequestState.RUNNING, RequestState.CLOSING, RequestState.ENDED}),
    RequestState.RUNNING: frozenset(
        {RequestState.PREEMPTED, RequestState.HANDING_OVER, RequestState.CLOSING, RequestState.ENDED}
    ),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.ENDED}),
    RequestState.HANDING_OVER: frozenset({RequestState.CLOSING, RequestState.ENDED}),
    RequestState.CLOSING: frozenset({RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}


_OF_THE_GROUP: frozenset[LifetimeEvent] = frozenset(
    {
        LifetimeEvent.SCHEDULED,
        LifetimeEvent.OFFERED,
        LifetimeEvent.RESERVED,
        LifetimeEvent.FIRST_FRAME,
        LifetimeEvent.SPLICED,
        LifetimeEvent.RUNNING,  # of a leader that computes its prompt on decode; the others' comes behind the fork
    }
)
"""What happens to a leader happens to its followers. Times of the transfer are one member's to tell: it is one."""


class IllegalMoveError(AssertionError):
    """Our own bug: a request was moved against the table."""


@dataclass(eq=False)
class Request:
    """Tokens, blocks and progress of (request, attempt) on this worker.

    `gateway` is the name of the gateway that owns it; `events` holds clock readings in seconds (monotonic). `lent`: a
    transfer's thread may touch its blocks, so they can't be freed before the transfer has ended. `num_cached`: tokens
    whose KV was in the pool already when it was admitted. `arrival`: its number among all that came to this
    worker. `witness` is told of each event. `logprobs`: of the last output tokens, as far as its gateway has not heard
    them, if it asks for them. `num_scored`: prompt tokens behind the first one whose log probabilities it has heard.
    `leader`, `followers`: of its group, while that has one KV. `is_over`: its terminal word is given.
    """

    spec: RequestSpec
    gateway: str
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(init=False)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    arrival: int = 0
    events: dict[LifetimeEvent, float] = field(default_factory=dict)
    lent: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_scored: int = 0
    witness: Witness = unwatched
    leader: "Request | None" = field(default=None, init=False)
    followers: list["Request"] = field(default_factory=list, init=False)
    is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.output_token_ids = list(self.spec.output_token_ids)

    @property
    def key(self) -> RequestKey:
        return (self.spec.request_id, self.spec.attempt)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.spec.prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def num_prompt(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def num_resumed(self) -> int:
        """Output tokens that earlier attempts have generated."""
        return len(self.spec.output_token_ids)

    @property
    def num_prefill(self) -> int:
        """Tokens that prefill computes and decode starts from."""
        return self.num_prompt + self.num_resumed

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_members(self) -> int:
        """Rows that it may need at once: its own, which as a carrier it has too, and those of its followers."""
        return 1 + len(self.followers)

    def follow(self, leader: "Request") -> None:
        """Joins a group that has no first token yet."""
        self.move(RequestState.FOLLOWING)
        self.leader = leader
        leader.followers.append(self)

    def part(self) -> None:
        """Leaves its group: it is over, or has the KV now."""
        if self.leader is not None:
            self.events |= self._shared_events()
            self.leader.followers.remove(self)
            self.leader = None

    def _shared_events(self) -> dict[LifetimeEvent, float]:
        if self.leader is None:
            return {}
        return {event: at for event, at in self.leader.events.items() if event in _OF_THE_GROUP}

    @property
    def scores_prompt(self) -> bool:
        """Whether it is still to be told how likely tokens of the prompt were. Until then all of it is computed: KV
        that is found somewhere brings no logits."""
        return self.sampling.num_prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    def append(self, drawn: Drawn) -> None:
        """The next output token. Its log probability is kept if the request asks for it."""
        self.output_token_ids.append(drawn.token_id)
        if drawn.logprob is not None and self.sampling.num_logprobs is not None:
            self.logprobs.append(drawn.logprob)

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop), prompt and output alike."""
        prompt = self.spec.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(0, start - self.num_prompt) : max(0, stop - self.num_prompt)]
        return [*prompt, *output]

    def move(self, state: RequestState) -> None:
        """The only way to change `state`; raises IllegalMoveError off the table."""
        if state not in _MOVES[self.state]:
            raise IllegalMoveError(f"request {self.key}: {self.state.name} -> {state.name} is not a legal move")
        self.state = state

    def readings(self) -> dict[LifetimeEvent, float]:
        """Lifetime readings as they go over the wire: seconds since RECEIVED."""
        start = self.events[LifetimeEvent.RECEIVED]
        return {event: at - start for event, at in (self.events | self._shared_events()).items()}

    def record(self, event: LifetimeEvent, now: float) -> None:
        """Notes the first time that `event` happened."""
        if event not in self.events:
            self.events[event] = now
            self.witness(self.key, event)


@dataclass(frozen=True)
class Outgoing:
    """What one request has to say to the gateway that owns it."""

    gateway: str
    output: RequestOutput


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens [start, start + count) of one request in a step. `start` tokens have their KV in the pool already.

    A row of no tokens is a follower's behind the row of its leader: it draws from the same logits."""

    request: Request
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the step ends at the request's last known token, so that its logits give the next one."""
        return self.stop == self.request.num_tokens

    @property
    def scored(self) -> range:
        """Positions whose logits say how likely the prompt's next token was, of those that are still to be told."""
        request = self.request
        if not request.scores_prompt:
            return range(0)
        assert self.start <= request.num_scored, f"{request.key}: from {self.start}, scored are {request.num_scored}"
        return range(request.num_scored, max(request.num_scored, min(self.stop, request.num_prompt - 1)))


@dataclass(frozen=True)
class RowLogprobs:
    """What one row of a step has told: of the token that it sampled, and of prompt tokens in order, if asked."""

    token: TokenLogprob | None = None
    prompt: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """For each row of a step the token it sampled, or None; and by the row's index what it has told of likelihoods."""

    token_ids: Sequence[int | None]
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)


def with_followers(rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    """`rows`, and behind each that ends a group's prompt one of no tokens for each follower."""
    return [
        member_row
        for row in rows
        for member_row in (
            row,
            *(ScheduledRow(follower, row.stop, 0) for follower in row.request.followers if row.samples),
        )
    ]
