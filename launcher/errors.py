"""Exceptions of the launcher.

SettingsError (kvtransfer.errors)   printed as one line, exit code 2
├── ModelUnavailableError           the model that a setting names cannot be had on this machine
├── PortUnavailableError            the address that a setting names cannot be listened on
└── RefusedByRoleError              a role says that its settings do not fit each other, the model or the machine
LaunchError                         the processes did not start or did not stay; exit code 1
"""

from kvtransfer.errors import SettingsError


class ModelUnavailableError(SettingsError):
    """The model is missing, unreachable, damaged, or cannot be converted here; the message says what to do."""


class PortUnavailableError(SettingsError):
    """The address is in use, not ours, or not allowed."""


class RefusedByRoleError(SettingsError):
    """A process that was started ended with the exit code for wrong settings; the message is its own."""


class LaunchError(Exception):
    """The cluster on this machine cannot go on; `str(error)` is for the terminal and may have several lines."""
