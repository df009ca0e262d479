"""What the schedulers of both roles have in common: their requests, queues and books, and how a request ends.

Knows no torch, socket or clock. A request is in exactly one place:

    _waiting (WAITING, OFFERED) -> _running (RUNNING)
    neither, while a transfer has it (RECEIVING, HANDING_OVER, CLOSING)

and in `_requests` until its blocks are free again. What a scheduler decides is drained by its worker: `take_outputs` is
for the gateways, `take_commands` for the thread that moves KV.
"""

import abc
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from engine.block_pool import BlockPool
from engine.request import Outgoing, Request, RequestState, ScheduledRow
from kvtransfer.messages import MAX_TEXT_CHARS, EndReason, LifetimeEvent, RequestEnd, RequestKey

Job = TypeVar("Job", bound=Request)
Command = TypeVar("Command")


class RequestBook(abc.ABC, Generic[Job, Command]):
    """All requests of a worker. Subclasses say when a request gets blocks, and what a step computes."""

    def __init__(self, pool: BlockPool, max_waiting: int) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._requests: dict[RequestKey, Job] = {}
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []  # in the order in which they came to run
        self._outputs: list[Outgoing] = []
        self._commands: list[Command] = []

    # --- what it holds

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that have no blocks yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, computing or not."""
        return sum(1 for request in self._requests.values() if request.block_ids)

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

    # --- events

    def add(self, request: Job, now: float) -> None:
        """Queues a request, or ends it at once with OVERLOADED if the queue is full."""
        if request.key in self._requests:
            return  # a repeated message; the first one is being served
        request.record(LifetimeEvent.RECEIVED, now)
        self._requests[request.key] = request
        if len(self._waiting) >= self._max_waiting:
            self._end(request, EndReason.OVERLOADED, now, "the queue of this worker is full")
            return
        self._waiting.append(request)
        self._queued(request, now)

    def cancel(self, key: RequestKey, now: float) -> None:
        """The gateway no longer wants the request."""
        request = self._requests.get(key)
        if request is not None and request.state is not RequestState.CLOSING:
            self._end(request, EndReason.CANCELLED, now)

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

    @abc.abstractmethod
    def complete(self, rows: Sequence[ScheduledRow], sampled: Sequence[int | None], now: float) -> None:
        """Books a step: for each row the token it sampled, or None."""

    def _queued(self, request: Job, now: float) -> None:
        """`request` has just been queued; where that is all, nothing is left to do."""
        return

    @abc.abstractmethod
    def _stop_transfer(self, request: Job, reason: EndReason, message: str) -> Command:
        """The command that ends the transfer which has `request`'s blocks on loan."""

    @abc.abstractmethod
    def _say(self, request: Job, end: RequestEnd | None) -> None:
        """Adds to the outputs what is new of a request."""

    # --- ends

    def _end(self, request: Job, reason: EndReason, now: float, message: str = "") -> None:
        """The one place where a request gets its terminal word. Blocks on loan come back later, the others now."""
        request.record(LifetimeEvent.ENDED, now)
        self._say(request, RequestEnd(reason, message[:MAX_TEXT_CHARS]))
        self._unlist(request)
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
        self._pool.free(request.block_ids, owner=request.key)
        request.block_ids = []
        request.move(RequestState.ENDED)
        del self._requests[request.key]
