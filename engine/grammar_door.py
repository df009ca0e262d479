"""Where requests with a grammar wait until it is compiled: beside the step loop, in threads of its own.

add -> door: unknown: compile, replay the output so far --ready--> book        as any other request
             known:   replay                            --refused--> REJECTED
                                                        --accident--> FAILED: its gateway tries another worker

A grammar may take seconds to compile, so those that are known have a thread for themselves.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic

from llguidance import LLMatcher

from engine.errors import AccidentError, EngineError, RejectedError
from engine.grammars import Grammars
from engine.request_book import Job
from engine.token_masks import TokenMasks
from kvtransfer.codec import RequestKey

logger = logging.getLogger(__name__)

MAX_AT_DOOR: Final = 256


@dataclass(frozen=True)
class _Group(Generic[Job]):
    """A request, those that follow it, and the first one's grammar in the making."""

    members: list[Job]
    future: Future[LLMatcher]

    @property
    def is_deserted(self) -> bool:
        return all(member.is_over for member in self.members)


class GrammarDoor(Generic[Job]):
    """Of a worker's loop alone, but for the threads inside, which call `wake` when a request is ready."""

    def __init__(self, grammars: Grammars, masks: TokenMasks, wake: Callable[[], None]) -> None:
        self.masks = masks
        self._grammars = grammars
        self._wake = wake
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._replaying = ThreadPoolExecutor(1, thread_name_prefix="known-grammars")
        self._lock = threading.Lock()  # who wakes has done so when `close` returns
        self._is_closed = False
        self._waiting: dict[RequestKey, _Group[Job]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_AT_DOOR

    def enter(self, request: Job, followers: Sequence[Job] = ()) -> None:
        """`take_ready` gives it back, with the further choices of its prompt. A repeated message changes nothing."""
        if request.key not in self._waiting:
            future = self._thread_for(request).submit(self._grammars.matcher_for, request)
            self._waiting[request.key] = _Group([request, *followers], future)
            future.add_done_callback(self._on_ready)

    def take_ready(self) -> list[tuple[list[Job], EngineError | None]]:
        """Those that may go in, and those that may not with what is wrong, a RejectedError or an AccidentError; in the
        order in which they came."""
        ready = [group for group in self._waiting.values() if group.future.done()]
        for group in ready:
            del self._waiting[group.members[0].key]
        return [(group.members, self._outcome(group)) for group in ready]

    def leave(self, key: RequestKey, gateway: str) -> Job | None:
        """The request of this name and gateway, if it waits here: it is over now. One that others follow stays as their
        carrier, as it does in the book: their KV comes, or goes, under its name."""
        for leader, group in self._waiting.items():
            for member in group.members:
                if member.key == key and member.gateway == gateway and not member.is_over:
                    member.is_over = True
                    if member.key != leader:
                        group.members.remove(member)
                    if group.is_deserted:
                        self._drop(leader)
                    return member
        return None

    def leave_all_of(self, gateway: str) -> list[Job]:
        """All requests of a gateway that waits for them here; they are over now."""
        leaders = [leader for leader, group in self._waiting.items() if group.members[0].gateway == gateway]
        left = [member for leader in leaders for member in self._drop(leader) if not member.is_over]
        for member in left:
            member.is_over = True
        return left

    def close(self) -> None:
        """Takes no more requests, compiles nothing that it has not begun with, and wakes nobody: another role may have
        taken this one's place, and has a door of its own."""
        with self._lock:
            self._is_closed = True
        for thread in (self._compiling, self._replaying):
            thread.shutdown(wait=False, cancel_futures=True)

    def _on_ready(self, _: Future[LLMatcher]) -> None:
        with self._lock:
            if not self._is_closed:
                self._wake()

    def _thread_for(self, request: Job) -> ThreadPoolExecutor:
        grammar = request.sampling.grammar
        assert grammar is not None, request.key
        return self._replaying if self._grammars.knows(grammar) else self._compiling

    def _drop(self, leader: RequestKey) -> list[Job]:
        group = self._waiting.pop(leader)
        group.future.cancel()
        return group.members

    def _outcome(self, group: "_Group[Job]") -> EngineError | None:
        request, *followers = group.members
        try:
            matcher = group.future.result()
            for follower in followers:
                self.masks.adopt(follower, matcher.deep_copy())
            self.masks.adopt(request, matcher)
        except (RejectedError, AccidentError) as error:
            return error
        except Exception:
            logger.exception("the grammar of request %s could not be compiled", request.key)
            return AccidentError("the grammar could not be compiled")
        return None
