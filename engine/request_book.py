"""What both schedulers keep: the requests of one worker, what they have to say, and who may end them.

Knows no torch, socket or clock.
"""

import abc
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from engine.request import Outgoing, Request, RequestKey, RequestState
from kvtransfer.messages import EndReason, RequestEnd

Job = TypeVar("Job", bound=Request)


class RequestBook(abc.ABC, Generic[Job]):
    """All requests of a worker by key. A request leaves the book when its blocks are free again."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Job] = {}
        self._outputs: list[Outgoing] = []

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, key: RequestKey) -> Job | None:
        return self._requests.get(key)

    def held_blocks(self) -> Iterator[tuple[RequestKey, Sequence[int]]]:
        """(owner, block ids) of all requests, for the pool's integrity check."""
        return ((key, request.block_ids) for key, request in self._requests.items())

    def take_outputs(self) -> list[Outgoing]:
        """What the gateways have to know, in order; each is handed out once."""
        outputs, self._outputs = self._outputs, []
        return outputs

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

    @abc.abstractmethod
    def _end(self, request: Job, reason: EndReason, now: float, message: str = "") -> None:
        """The one place where a request gets its terminal word."""

    @abc.abstractmethod
    def _say(self, request: Job, end: RequestEnd | None) -> None:
        """Adds to the outputs what is new of a request."""
