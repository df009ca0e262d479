"""Chooses the backend of a process, once, by name and device. The errors are those of `kernels.errors`."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from kernels.cpu.backend import CpuKernels
from kernels.errors import KernelsError, UnavailableBackendError, UnknownBackendError
from kernels.face import Kernels
from kernels.reference import ReferenceKernels

__all__ = ["AUTO", "BACKEND_NAMES", "KernelsError", "UnavailableBackendError", "UnknownBackendError", "select_kernels"]

logger = logging.getLogger(__name__)

AUTO: Final = "auto"

_BACKENDS: Final[Mapping[str, Callable[[], Kernels]]] = MappingProxyType(
    {ReferenceKernels.name: ReferenceKernels, CpuKernels.name: CpuKernels.native}
)
_FASTEST: Final[Mapping[str, str]] = MappingProxyType({"cpu": CpuKernels.name, "cuda": ReferenceKernels.name})
_ONLY_ON: Final[Mapping[str, str]] = MappingProxyType({CpuKernels.name: "cpu"})

BACKEND_NAMES: Final = (AUTO, *_BACKENDS)
"""What `--kernels` takes."""


def select_kernels(name: str, device: torch.device) -> Kernels:
    """The backend called `name`; "auto" takes the fastest one for `device` that this machine can build, the reference
    if it can build none. Raises UnknownBackendError, and UnavailableBackendError for a backend asked for by name."""
    if name == AUTO:
        return _fastest(device)
    if name not in _BACKENDS:
        raise UnknownBackendError(f"unknown kernels {name!r}; choose one of: {', '.join(BACKEND_NAMES)}")
    if _ONLY_ON.get(name, device.type) != device.type:
        raise UnknownBackendError(f"kernels {name!r} run on device type {_ONLY_ON[name]!r}, not on {device.type!r}")
    return _BACKENDS[name]()


def _fastest(device: torch.device) -> Kernels:
    if device.type not in _FASTEST:
        raise UnknownBackendError(f"no kernels for device type {device.type!r}; there are some for {[*_FASTEST]}")
    name = _FASTEST[device.type]
    try:
        return _BACKENDS[name]()
    except UnavailableBackendError as error:
        logger.warning("no %s kernels: plain torch computes instead, several times slower. Cause: %s", name, error)
        return ReferenceKernels()
