"""What may go wrong when a backend is chosen.

KernelsError                root of the errors of `kernels`
├── UnknownBackendError     the name is not a backend, or not one for that device; says which names are
└── UnavailableBackendError the backend exists, but this machine cannot build or load it; says why
"""


class KernelsError(Exception):
    """Root of all errors raised by `kernels`."""


class UnknownBackendError(KernelsError):
    """No backend of that name, or none for that type of device."""


class UnavailableBackendError(KernelsError):
    """The backend cannot be built or loaded on this machine."""
