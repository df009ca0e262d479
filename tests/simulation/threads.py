"""What stands for threads, mailboxes and the event loop of a process: turns that the timeline runs."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tests.simulation.errors import ViolationError, require
from tests.simulation.timeline import Timeline, Timer

MAX_CALLBACKS_A_TURN = 100_000


class Thread:
    """Runs `turn` when woken, and at the latest after the seconds that `turn` returned.

    `lag` says how long a wake-up takes; `ready_at` when the process may run at all (None: it is dead).
    """

    def __init__(
        self,
        timeline: Timeline,
        turn: Callable[[], float],
        lag: Callable[[], float],
        ready_at: Callable[[], float | None],
    ) -> None:
        self._timeline = timeline
        self._turn = turn
        self._lag = lag
        self._ready_at = ready_at
        self._due: Timer | None = None
        self._is_running = False

    def wake(self) -> None:
        self._come(self._timeline.now + self._lag())

    def _come(self, when: float) -> None:
        if self._due is not None and not self._due.is_cancelled:
            if self._due.when <= when:
                return
            self._due.cancel()
        self._due = self._timeline.at(when, self._run)

    def _run(self) -> None:
        self._due = None
        ready_at = self._ready_at()
        if ready_at is None:
            return
        if ready_at > self._timeline.now:
            self._come(ready_at)
            return
        self._come(self._timeline.now + self.run_now())

    def run_now(self) -> float:
        """A turn in this very moment; the seconds to the next one. Nothing inside of a turn of its own."""
        if self._is_running:
            return 0.0
        self._is_running = True
        try:
            return self._turn()
        finally:
            self._is_running = False


class ThreadHandle:
    """Stands for `threading.Thread` in the objects that own one; it runs as long as its process lives."""

    def __init__(self, thread: Thread) -> None:
        self.wake = thread.wake
        self._is_started = False

    def start(self) -> None:
        self._is_started = True
        self.wake()

    def is_alive(self) -> bool:
        return self._is_started

    def join(self, timeout: float | None = None) -> None: ...


class SimMailbox:
    """Stands for `kvtransfer.mailbox.Mailbox`: `wake` is called where the real one writes to its pipe."""

    def __init__(self, wake: Callable[[], None], on_put: Callable[[Any], None] | None = None) -> None:
        self._wake = wake
        self._on_put = on_put
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._on_put is not None:
            self._on_put(item)
        self._wake()

    def put_all(self, items: Iterable[Any]) -> None:
        for item in items:
            self.put(item)

    @property
    def backlog(self) -> int:
        return len(self._items)

    def peek(self) -> list[Any]:
        return self._items

    def drain(self) -> list[Any]:
        items, self._items = self._items, []
        return items

    def wait(self, timeout: float) -> list[Any]:
        return self.drain()

    def close(self) -> None: ...


class _Callback:
    """Stands for `asyncio.Handle`."""

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None) -> None:
        self._call = call
        self._args = args
        self._context = context or contextvars.copy_context()
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def run(self) -> None:
        if not self._is_cancelled:
            self._context.run(self._call, *self._args)


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop in simulated time, as much of one as tasks, futures, sleeps and task groups need."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ready: deque[_Callback] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self.wake: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self._timeline.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> _Callback:
        soon = _Callback(callback, args, context)
        self._append(soon)
        return soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> _Callback:
        later = _Callback(callback, args, context)
        self._timeline.after(delay, self._append, later)
        return later

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> _Callback:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _append(self, callback: _Callback) -> None:
        self._ready.append(callback)
        self.wake()

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise ViolationError(f"the event loop complains: {context.get('message')} {context.get('exception')!r}")

    def run_ready(self) -> None:
        """All that is ready, and what this makes ready."""
        num_run = 0
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                self._ready.popleft().run()
                num_run += 1
                require(num_run < MAX_CALLBACKS_A_TURN, "the event loop never comes to rest")
        finally:
            asyncio._set_running_loop(None)

    def bury(self) -> None:
        """Winds up all tasks, so that no coroutine is left half-way. What their process said must be deaf by now."""
        for task in self._tasks:
            task.cancel()
        self.run_ready()
        self._tasks.clear()
