"""Where requests with a grammar wait until it is compiled: beside the step loop, in a thread of its own.

add -> door: compile, replay the output so far --ready--> book        as any other request
                                               --refused--> REJECTED
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic

from llguidance import LLMatcher

from engine.errors import RejectedError
from engine.grammars import Grammars
from engine.request_book import Job
from engine.token_masks import TokenMasks
from kvtransfer.messages import RequestKey

logger = logging.getLogger(__name__)

MAX_AT_DOOR: Final = 256


class GrammarDoor(Generic[Job]):
    """Of a worker's loop alone, but for the thread inside, which calls `wake` when a request is ready."""

    def __init__(self, grammars: Grammars, masks: TokenMasks, wake: Callable[[], None]) -> None:
        self.masks = masks
        self._grammars = grammars
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._waiting: dict[RequestKey, tuple[Job, Future[LLMatcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_AT_DOOR

    def enter(self, request: Job) -> None:
        """`take_ready` gives it back. A repeated message changes nothing."""
        if request.key not in self._waiting:
            future = self._thread.submit(self._grammars.matcher_for, request)
            self._waiting[request.key] = (request, future)
            future.add_done_callback(lambda _: self._wake())

    def take_ready(self) -> list[tuple[Job, RejectedError | None]]:
        """Those that may go in, and those that may not with what is wrong; in the order in which they came."""
        ready = [(request, future) for request, future in self._waiting.values() if future.done()]
        for request, _ in ready:
            del self._waiting[request.key]
        return [(request, self._outcome(request, future)) for request, future in ready]

    def leave(self, key: RequestKey, gateway: str) -> Job | None:
        """Takes away a request of this gateway, if it waits here."""
        request, future = self._waiting.get(key, (None, None))
        if request is None or future is None or request.gateway != gateway:
            return None
        future.cancel()
        del self._waiting[key]
        return request

    def leave_all_of(self, gateway: str) -> list[Job]:
        """Takes away all requests of a gateway."""
        gone = [self.leave(key, gateway) for key in list(self._waiting)]
        return [request for request in gone if request is not None]

    def _outcome(self, request: Job, future: Future[LLMatcher]) -> RejectedError | None:
        try:
            self.masks.adopt(request, future.result())
        except RejectedError as error:
            return error
        except Exception:
            logger.exception("the grammar of request %s could not be compiled", request.key)
            return RejectedError("the grammar could not be compiled")
        return None
