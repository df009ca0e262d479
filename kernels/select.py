"""Chooses the backend of a process, once, by name and device.

KernelsError            root of the errors of `kernels`
└── UnknownBackendError the name is not a backend; says which names are
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from kernels.face import Kernels
from kernels.reference import ReferenceKernels

AUTO: Final = "auto"

_BACKENDS: Final[Mapping[str, Callable[[], Kernels]]] = MappingProxyType({ReferenceKernels.name: ReferenceKernels})
_FASTEST: Final[Mapping[str, str]] = MappingProxyType({"cpu": ReferenceKernels.name, "cuda": ReferenceKernels.name})

BACKEND_NAMES: Final = (AUTO, *_BACKENDS)
"""What `--kernels` takes."""


class KernelsError(Exception):
    """Root of all errors raised by `kernels`."""


class UnknownBackendError(KernelsError):
    """No backend of that name, or none for that type of device."""


def select_kernels(name: str, device: torch.device) -> Kernels:
    """The backend called `name`; "auto" takes the fastest one for `device`. Raises UnknownBackendError."""
    if name == AUTO:
        if device.type not in _FASTEST:
            raise UnknownBackendError(f"no kernels for device type {device.type!r}; there are some for {[*_FASTEST]}")
        name = _FASTEST[device.type]
    if name not in _BACKENDS:
        raise UnknownBackendError(f"unknown kernels {name!r}; choose one of: {', '.join(BACKEND_NAMES)}")
    return _BACKENDS[name]()
