"""Where requests with a grammar wait until it is compiled: beside the step loop, in a thread of its own.

add -> door: compile, replay the output so far --ready--> book        as any other request
                                               --refused--> REJECTED
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic

from llguidance import LLMatcher

from engine.errors import RejectedError
from engine.grammars import Grammars
from engine.request_book import Job
from engine.token_masks import TokenMasks
from kvtransfer.messages import RequestKey

logger = logging.getLogger(__name__)

MAX_AT_DOOR: Final = 256


@dataclass(frozen=True)
class _Group(Generic[Job]):
    """A request, those that follow it, and the first one's grammar in the making."""

    members: list[Job]
    future: Future[LLMatcher]

    def is_of(self, gateway: str) -> bool:
        return self.members[0].gateway == gateway


class GrammarDoor(Generic[Job]):
    """Of a worker's loop alone, but for the thread inside, which calls `wake` when a request is ready."""

    def __init__(self, grammars: Grammars, masks: TokenMasks, wake: Callable[[], None]) -> None:
        self.masks = masks
        self._grammars = grammars
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._waiting: dict[RequestKey, _Group[Job]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_AT_DOOR

    def enter(self, request: Job, followers: Sequence[Job] = ()) -> None:
        """`take_ready` gives it back, with the further choices of its prompt. A repeated message changes nothing."""
        if request.key not in self._waiting:
            future = self._thread.submit(self._grammars.matcher_for, request)
            self._waiting[request.key] = _Group([request, *followers], future)
            future.add_done_callback(lambda _: self._wake())

    def take_ready(self) -> list[tuple[list[Job], RejectedError | None]]:
        """Those that may go in, and those that may not with what is wrong; in the order in which they came."""
        ready = [group for group in self._waiting.values() if group.future.done()]
        for group in ready:
            del self._waiting[group.members[0].key]
        return [(group.members, self._outcome(group)) for group in ready]

    def leave(self, key: RequestKey, gateway: str) -> list[Job]:
        """Takes away a request of this gateway, if it waits here, and behind it those that followed it."""
        for leader, group in self._waiting.items():
            for place, member in enumerate(group.members):
                if member.key == key and member.gateway == gateway:
                    if place:
                        return [group.members.pop(place)]
                    group.future.cancel()
                    return self._waiting.pop(leader).members
        return []

    def leave_all_of(self, gateway: str) -> list[list[Job]]:
        """Takes away all requests of a gateway."""
        return [self.leave(key, gateway) for key, group in list(self._waiting.items()) if group.is_of(gateway)]

    def _outcome(self, group: "_Group[Job]") -> RejectedError | None:
        request, *followers = group.members
        try:
            matcher = group.future.result()
            for follower in followers:
                self.masks.adopt(follower, matcher.deep_copy())
            self.masks.adopt(request, matcher)
        except RejectedError as error:
            return error
        except Exception:
            logger.exception("the grammar of request %s could not be compiled", request.key)
            return RejectedError("the grammar could not be compiled")
        return None
