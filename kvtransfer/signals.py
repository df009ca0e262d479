"""How a process of ours ends: on a signal before it has anything to stop in order, and at the end of its work."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, NoReturn

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_WITHIN_S: Final = 1.0
"""What a process that loads gets to leave in order: less than the launcher's patience."""


def exit_on_signals() -> None:
    """While a process still loads, a signal ends it with 0 and without a traceback: in order, or at EXIT_WITHIN_S."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: _exit())


def _exit() -> NoReturn:
    """Python ignores an exception that is raised in a `__del__` or a callback, and loading is full of both. An alarm
    whose handler raises nothing can't be ignored; the first signal sets it, and others don't put it off."""
    if signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0):
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, EXIT_WITHIN_S)
    sys.exit(0)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends the process with its exit code, without the interpreter's clean-up: that of torch or
    transformers takes a second of computing, which is five on a busy machine, and all that is ours has been closed by
    then. An exception that `main` does not catch ends the process as ever."""
    try:
        code = main()
    except SystemExit as ended:
        code = _code_of(ended)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(ended: SystemExit) -> int:
    assert ended.code is None or isinstance(ended.code, int), f"an exit with {ended.code!r}"
    return ended.code or 0
