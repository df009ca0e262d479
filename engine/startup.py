"""How a worker process fails at its start: one line that says why, and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError
from kernels.errors import KernelsError
from kvtransfer.errors import SettingsError
from kvtransfer.settings import exit_with


@contextmanager
def failures_in_one_line(prog: str) -> Iterator[None]:
    """Exit code 2 for what the operator asked wrongly, 1 for a checkpoint or a machine that can't do it."""
    try:
        yield
    except (SettingsError, KernelsError) as error:
        exit_with(prog, error, 2)
    except EngineError as error:
        exit_with(prog, error, 1)
