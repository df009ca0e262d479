"""Exceptions of the kernels.

KernelsError
├── UnknownBackendError       the name is not a backend; says which names are
├── UnavailableBackendError   the backend cannot run here; says why
└── UnsupportedShapeError     the backend has no kernel for such a head size; says which backend has
"""


class KernelsError(Exception):
    """Root of all errors raised by `kernels`."""


class UnknownBackendError(KernelsError):
    """No backend of that name, or none for that type of device."""


class UnavailableBackendError(KernelsError):
    """A backend that cannot run on this machine or device; the message says what is missing."""


class UnsupportedShapeError(KernelsError):
    """A model whose shape a backend was not written for."""
