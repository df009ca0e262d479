"""Exceptions of the launcher.

SettingsError (kvtransfer.errors)   printed as one line, exit code 2
├── ModelUnavailableError           the model that a setting names cannot be had on this machine
├── LineError                       a line of the input of `kvsplice generate` is wrong; the message names it
├── ChangedInputError               its output holds results of another input, other settings, or another checkpoint
├── PortUnavailableError            the address that a setting names cannot be listened on
└── RefusedByRoleError              a role says that its settings do not fit each other, the model or the machine
LaunchError                         the processes did not start or did not stay; exit code 1
"""

from kvtransfer.errors import SettingsError


class ModelUnavailableError(SettingsError):
    """The model is missing, unreachable, damaged, or cannot be converted here; the message says what to do."""


class LineError(SettingsError):
    """An input line that can't be done."""

    def __init__(self, number: int, what: str) -> None:
        """`number` counts from 1."""
        super().__init__(f"line {number} of the input: {what}")


class ChangedInputError(SettingsError):
    """The output was begun with something else than what is to go on now."""

    def __init__(self, number: int) -> None:
        """`number`: of a line with a result that does not fit."""
        super().__init__(
            f"--output has a result for line {number} that comes of another line, other sampling settings, or another "
            "model or state of it: go on with what it was begun with, or name another file"
        )


class PortUnavailableError(SettingsError):
    """The address is in use, not ours, or not allowed."""


class RefusedByRoleError(SettingsError):
    """A process that was started ended with the exit code for wrong settings; the message is its own."""


class LaunchError(Exception):
    """The cluster on this machine cannot go on; `str(error)` is for the terminal and may have several lines."""
