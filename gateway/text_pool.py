"""Runs work on text (templates, tokenising) beside the event loop, in few threads and with a time limit."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import TextTimeoutError

_T = TypeVar("_T")


class TextPool:
    """Threads for text. What waits here is bounded by the number of requests that are admitted at once.

    A thread can't be stopped: work past its time keeps its thread, but nobody waits for it any more. So callers bound
    the size of what they hand over.
    """

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._timeout_s = timeout_s

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. Raises TextTimeoutError."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            raise TextTimeoutError("the text of the request took too long to process") from None

    def close(self) -> None:
        """Takes no more work and waits for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)
