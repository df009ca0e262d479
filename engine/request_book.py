"""What the schedulers of both roles have in common: their requests, queues and blocks, and how a request ends.

Knows no torch, socket or clock. A request is in exactly one place:

    _waiting (WAITING, OFFERED) -> _running (RUNNING)
    neither, while a transfer has it (RECEIVING, HANDING_OVER, CLOSING), or while its blocks are others' (PREEMPTED)

and in `_requests` until its blocks are free again. What a scheduler decides is drained by its worker: `take_outputs` is
for the gateways, `take_commands` for the thread that moves KV, `take_moves` for the engine before its next step.
"""

import abc
import bisect
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Generic, Protocol, TypeVar

from engine.block_moves import BlockMove
from engine.block_pool import BlockPool
from engine.queue_rules import QueueRules
from engine.request import Outgoing, Request, RequestState, RowLogprobs, ScheduledRow, StepResult
from engine.request_blocks import RequestBlocks
from engine.stopping import finish_reason
from kvtransfer.codec import MAX_TEXT_CHARS, RequestKey
from kvtransfer.request_parts import (
    Drawn,
    EndReason,
    LifetimeEvent,
    PromptLogprobs,
    RequestEnd,
    RequestOutput,
    TokenLogprob,
)
from kvtransfer.worker_facts import Load


class BookLimits(Protocol):
    """What every scheduler is bound by: requests that hold blocks at once, tokens a request."""

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


Job = TypeVar("Job", bound=Request)
Command = TypeVar("Command")
Limits = TypeVar("Limits", bound=BookLimits)
Place = tuple[int, int]
"""Where a request stands among others: the smaller, the sooner."""


class RequestBook(abc.ABC, Generic[Job, Command, Limits]):
    """All requests of a worker. Subclasses say when a request gets blocks, and what a step computes."""

    def __init__(self, pool: BlockPool, rules: QueueRules, limits: Limits, eos_token_ids: AbstractSet[int]) -> None:
        self._pool = pool
        self._blocks = RequestBlocks(pool, share_prefixes=rules.share_prefixes)
        self._rules = rules
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._requests: dict[RequestKey, Job] = {}
        self._waiting: list[Job] = []  # both in the order of their places
        self._running: list[Job] = []
        self._num_arrivals = 0
        self._outputs: list[Outgoing] = []
        self._commands: list[Command] = []
        self._moves: list[BlockMove] = []

    # --- what it holds

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that have no blocks yet."""
        return self._num_queued

    @property
    def _num_queued(self) -> int:
        return sum(request.num_members for request in self._waiting)

    @property
    def max_members(self) -> int:
        """Most choices of one group."""
        return self._limits.max_num_seqs

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, computing or not, and those that follow them."""
        return sum(request.num_members for request in self._requests.values() if request.block_ids)

    def load(self) -> Load:
        """What the next heartbeat says of this worker."""
        pool, counts = self._pool, self._pool.counts
        return Load(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_usage=pool.usage,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            kv_waste=self._blocks.waste(self._requests.values()),
            prefix_queries=counts.num_queried,
            prefix_hits=counts.num_hit,
            prefix_evictions=counts.num_evicted,
        )

    def find(self, key: RequestKey) -> Job | None:
        return self._requests.get(key)

    def held_blocks(self) -> Iterator[tuple[RequestKey, Sequence[int]]]:
        """(owner, block ids) of all requests, for the pool's integrity check."""
        return ((key, request.block_ids) for key, request in self._requests.items())

    def take_outputs(self) -> list[Outgoing]:
        """What the gateways have to know, in order; each is handed out once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_commands(self) -> list[Command]:
        """What the thread that moves KV has to do, in order; each is handed out once."""
        commands, self._commands = self._commands, []
        return commands

    def take_moves(self) -> list[BlockMove]:
        """What has to be moved before the next forward, in order; each is handed out once."""
        moves, self._moves = self._moves, []
        return moves

    def check_integrity(self) -> None:
        """Asserts that the blocks of all requests and the free ones make up the pool exactly."""
        self._pool.check_integrity(self.held_blocks())

    # --- events

    def add(self, request: Job, now: float, followers: Sequence[Job] = ()) -> None:
        """Queues a request with the further choices of its prompt, or ends all with OVERLOADED if the queue is full."""
        if request.key in self._requests:
            return  # a repeated message; the first one is being served
        is_full = self._num_queued >= self._rules.max_waiting
        self._enter(request, now)
        for follower in followers:
            if follower.key not in self._requests:
                self._enter(follower, now)
                follower.follow(request)
        if is_full:
            self._end(request, EndReason.OVERLOADED, now, "the queue of this worker is full")
            return
        bisect.insort(self._waiting, request, key=self._place)
        self._queued(request, now)

    def _enter(self, request: Job, now: float) -> None:
        request.record(LifetimeEvent.RECEIVED, now)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self._requests[request.key] = request

    def cancel(self, key: RequestKey, now: float) -> None:
        """The gateway no longer wants the request; what follows it goes on."""
        request = self._requests.get(key)
        if request is not None and not request.is_over:
            self._end_alone(request, EndReason.CANCELLED, now)

    def reject(self, key: RequestKey, reason: str, now: float) -> None:
        """The request can't go on; the reason is for its client."""
        request = self._requests.get(key)
        if request is not None and request.state is not RequestState.CLOSING:
            self._end(request, EndReason.REJECTED, now, reason)

    def cancel_all_of(self, gateway: str, now: float) -> None:
        """The gateway is gone, and with it everybody who waited."""
        for request in list(self._requests.values()):
            if request.gateway == gateway:
                self.cancel(request.key, now)

    # --- what a role decides

    @abc.abstractmethod
    def expire(self, now: float) -> None:
        """Ends requests that have waited for another worker, or for room, too long."""

    @abc.abstractmethod
    def schedule(self, now: float) -> list[ScheduledRow]:
        """The rows of the next step; empty if there is nothing to compute."""

    def complete(self, rows: Sequence[ScheduledRow], result: StepResult, now: float) -> None:
        """Books a step: what is computed, what it has told of prompts, and the tokens that it sampled."""
        drawn: dict[RequestKey, Drawn] = {}
        for index, (row, token_id) in enumerate(zip(rows, result.token_ids, strict=True)):
            assert (token_id is not None) == row.samples, f"row of {row.request.key} sampled {token_id}"
            if token_id is not None:
                drawn[row.request.key] = Drawn(token_id, result.logprobs.get(index, RowLogprobs()).token)
        for index, row in enumerate(rows):
            if row.count == 0:
                continue  # a follower's: it has its token with its leader
            job, told = self._requests[row.request.key], result.logprobs.get(index, RowLogprobs())
            self._blocks.note_computed(job, row.stop)
            if told.prompt:
                self._say_scores(job, told.prompt)
            if row.samples:
                self._sampled(job, drawn, now)

    @abc.abstractmethod
    def _sampled(self, request: Job, drawn: Mapping[RequestKey, Drawn], now: float) -> None:
        """A step has given `request`, and all that follow it, their next tokens: they are among `drawn`."""

    def _queued(self, request: Job, now: float) -> None:
        """`request` has just been queued; where that is all, nothing is left to do."""
        return

    @abc.abstractmethod
    def _stop_transfer(self, request: Job, reason: EndReason, message: str) -> Command:
        """The command that ends the transfer which has `request`'s blocks on loan."""

    @abc.abstractmethod
    def _say(self, request: Job, end: RequestEnd | None) -> None:
        """Adds to the outputs what is new of a request."""

    def _finish_reason(self, request: Job) -> EndReason | None:
        """Why it ends with the token that it has just got, if it does."""
        return finish_reason(request, self._eos_token_ids, self._limits.max_model_len)

    # --- order

    def _place(self, request: Job) -> Place:
        priority = request.spec.priority if self._rules.by_priority else 0
        return (priority, request.arrival)

    def _followers_of(self, request: Job) -> list[Job]:
        return [self._requests[follower.key] for follower in request.followers]

    def _run(self, request: Job) -> None:
        """Takes part in steps from now on."""
        request.move(RequestState.RUNNING)
        bisect.insort(self._running, request, key=self._place)

    def _say_scores(self, request: Job, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Tells the gateway how likely the prompt's next tokens were."""
        output = RequestOutput(
            request_id=request.spec.request_id,
            attempt=request.spec.attempt,
            start=request.num_resumed,
            prompt_logprobs=PromptLogprobs(request.num_scored + 1, logprobs),
        )
        request.num_scored += len(logprobs)
        self._outputs.append(Outgoing(request.gateway, output))

    # --- ends

    def _end_alone(self, request: Job, reason: EndReason, now: float, message: str = "") -> None:
        """Ends one choice of a group, or a request without one. A leader stays as long as it has followers."""
        leader = request.leader
        if request.followers:
            self._say_end(request, reason, now, message)
            return
        self._end(request, reason, now, message)
        if leader is not None and leader.is_over and not leader.followers:
            self._end(self._requests[leader.key], reason, now, message)

    def _say_end(self, request: Job, reason: EndReason, now: float, message: str) -> None:
        """The one place where a request gets its terminal word."""
        if not request.is_over:
            request.record(LifetimeEvent.ENDED, now)
            self._say(request, RequestEnd(reason, message[:MAX_TEXT_CHARS]))
            request.is_over = True

    def _end(self, request: Job, reason: EndReason, now: float, message: str = "") -> None:
        """Ends a request and all that follow it. Blocks on loan come back later, the others now."""
        self._unlist(request)
        for follower in self._followers_of(request):
            self._end(follower, reason, now, message)
        self._say_end(request, reason, now, message)
        request.part()
        if request.lent:
            request.move(RequestState.CLOSING)
            self._commands.append(self._stop_transfer(request, reason, message))
        else:
            self._release(request, now)

    def _unlist(self, request: Job) -> None:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _release(self, request: Job, now: float) -> None:
        """Frees a request's blocks and forgets it."""
        self._blocks.forget(request)
        request.move(RequestState.ENDED)
        del self._requests[request.key]
