"""How a worker process fails at its start: one line that says why, and an exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError
from kernels.select import KernelsError
from kvtransfer.errors import SettingsError


@contextmanager
def failures_in_one_line(prog: str) -> Iterator[None]:
    """Exit code 2 for what the operator asked wrongly, 1 for a checkpoint or a machine that can't do it."""
    try:
        yield
    except (SettingsError, KernelsError) as error:
        _exit(prog, error, 2)
    except EngineError as error:
        _exit(prog, error, 1)


def _exit(prog: str, error: Exception, code: int) -> None:
    line = " ".join(str(error).split())
    sys.stderr.write(f"{prog}: error: {line}\n")
    raise SystemExit(code) from None
