"""Ctrl-C and SIGTERM between two pieces of work, never within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """What a program has told to happen at SIGINT or SIGTERM happens at the end of the block, so that the books which
    the block keeps are whole. Only the main thread is ever interrupted by a signal: elsewhere nothing is deferred."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _NUMBERS}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    came: list[int] = []
    try:
        for number in ours:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
