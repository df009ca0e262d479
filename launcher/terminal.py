"""The terminal, shared by the children's logs and the launcher's own words."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

MAX_HELD_LINES: Final = 1000


class Terminal:
    """Writes whole lines to stderr, from any thread. While held, lines wait (the oldest give way past a bound)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: deque[str] | None = None

    def line(self, text: str) -> None:
        with self._lock:
            if self._held is None:
                _write(text)
            else:
                self._held.append(text)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps lines back, so that what the block prints stays in one piece."""
        with self._lock:
            self._held = deque(maxlen=MAX_HELD_LINES)
        try:
            yield
        finally:
            with self._lock:
                lines, self._held = self._held, None
                for text in lines:
                    _write(text)


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone; whoever logs must go on
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
