"""How a process of ours ends: on a signal before it has anything to stop in order, and at the end of its work."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, NoReturn

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def exit_on_signals() -> None:
    """While a process still loads, a signal ends it with 0 and without a traceback."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: sys.exit(0))


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
