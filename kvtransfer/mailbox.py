"""A queue between threads that can be waited on together with sockets. Knows nothing of what it carries."""

import os
import queue
import select
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Many threads put, one thread drains. `fileno()` turns readable when something is inside.

    A non-blocking pipe carries the wake-ups. One is enough until the reader has come, and a write lets the reader have
    the interpreter: whoever puts many items, as an engine does layer after layer, would wait for it each time.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._poll = select.poll()  # unlike select, takes file descriptors above 1023
        self._poll.register(self._read_end, select.POLLIN)
        self._is_woken = False
        self._is_closed = False
        # A wake-up after `close` might go into somebody else's file. Of a thread's own: a signal's handler may put too.
        self._closing = threading.RLock()

    def fileno(self) -> int:
        return self._read_end

    def put(self, item: Item) -> None:
        """Adds an item and wakes the reader. Safe from any thread. Once it is closed nobody reads any more."""
        self.put_all([item])

    def put_all(self, items: Iterable[Item]) -> None:
        """Adds items in order, and wakes the reader once."""
        for item in items:
            self._items.put(item)
        if not self._is_woken and not self._items.empty():
            self._wake()

    @property
    def backlog(self) -> int:
        """Items that wait to be drained. From any thread; true for a moment only, as others go on."""
        return self._items.qsize()

    def drain(self) -> list[Item]:
        """All items at hand, oldest first, without waiting."""
        if not self._is_closed:
            self._swallow_wakeups()
            self._is_woken = False
        items = []
        while True:
            try:
                items.append(self._items.get_nowait())
            except queue.Empty:
                return items

    def wait(self, timeout: float) -> list[Item]:
        """Like `drain`, after waiting up to `timeout` seconds for a first item."""
        if timeout > 0:
            self._poll.poll(timeout * 1000)
        return self.drain()

    def close(self) -> None:
        """Gives the pipe back. What is inside can still be drained, without waiting."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._read_end)
                os.close(self._write_end)

    def _wake(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_woken = True  # before the write: the reader takes it back between swallowing and taking items
                os.write(self._write_end, b"\0")

    def _swallow_wakeups(self) -> None:
        try:
            while os.read(self._read_end, 4096):
                pass
        except BlockingIOError:
            return
