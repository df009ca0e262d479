"""How a worker process fails at its start: one line that says why, and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import CapacityError, DeviceError, EngineError
from kernels.errors import KernelsError
from kvtransfer.command_line import exit_with
from kvtransfer.errors import SettingsError


@contextmanager
def failures_in_one_line(prog: str) -> Iterator[None]:
    """Exit code 2 for settings that are wrong, or ask more than the model or the machine can give; 1 for a checkpoint
    that can't be served."""
    try:
        yield
    except (SettingsError, KernelsError, DeviceError, CapacityError) as error:
        exit_with(prog, error, 2)
    except EngineError as error:
        exit_with(prog, error, 1)
