"""Chooses the backend of a process, once, by name and device.

A backend is imported only when it is chosen, so that neither triton nor a compiler has to be there.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import torch

from kernels.errors import UnavailableBackendError, UnknownBackendError
from kernels.face import Kernels
from kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)

AUTO: Final = "auto"


def _reference(_: torch.device, *, converts_kv: bool) -> Kernels:
    return ReferenceKernels()


def _triton(device: torch.device, *, converts_kv: bool) -> Kernels:
    """Raises UnavailableBackendError without triton, a GPU that it compiles for, or a C compiler: triton builds the
    little module that launches kernels at first use."""
    try:
        from kernels.triton_backend.device import check_device, triton_kernels
    except ImportError as error:
        raise UnavailableBackendError(f"triton cannot be imported: {error}") from error
    if device.type != "cpu" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UnavailableBackendError("triton needs a C compiler to launch kernels: install gcc, or name one in $CC")
    check_device(device)
    return triton_kernels(device)


def _cpu(device: torch.device, *, converts_kv: bool) -> Kernels:
    """Raises UnavailableBackendError on other devices, for KV in another format than the model's, and without a
    compiler that builds the library."""
    if device.type != "cpu":
        raise UnavailableBackendError(f"the native kernels run on device type 'cpu', not on {device.type!r}")
    if converts_kv:
        raise UnavailableBackendError(
            "the native kernels of a CPU keep K and V in the format that the model computes in"
        )
    from kernels.cpu.backend import CpuKernels

    return CpuKernels.native()


class _Backend(Protocol):
    def __call__(self, device: torch.device, /, *, converts_kv: bool) -> Kernels: ...


_BACKENDS: Final[Mapping[str, _Backend]] = MappingProxyType({"reference": _reference, "cpu": _cpu, "triton": _triton})
_BEST_FIRST: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
)

BACKEND_NAMES: Final = (AUTO, *_BACKENDS)
"""What `--kernels` takes."""


def select_kernels(name: str, device: torch.device, *, converts_kv: bool = False) -> Kernels:
    """The backend called `name`; "auto" takes the best that runs on `device`, and warns of each better one that does
    not. Raises UnknownBackendError, or UnavailableBackendError for a backend that was asked for by name.

    `converts_kv`: the pool's format is not the one that the model computes in."""
    if name == AUTO:
        return _best(device, converts_kv)
    if name not in _BACKENDS:
        raise UnknownBackendError(f"unknown kernels {name!r}; choose one of: {', '.join(BACKEND_NAMES)}")
    return _BACKENDS[name](device, converts_kv=converts_kv)


def _best(device: torch.device, converts_kv: bool) -> Kernels:
    if device.type not in _BEST_FIRST:
        raise UnknownBackendError(f"no kernels for device type {device.type!r}; there are some for {[*_BEST_FIRST]}")
    *better, last = _BEST_FIRST[device.type]
    for name in better:
        try:
            return _BACKENDS[name](device, converts_kv=converts_kv)
        except UnavailableBackendError as error:
            logger.warning("no %s kernels: plain torch computes instead, several times slower. Cause: %s", name, error)
    return _BACKENDS[last](device, converts_kv=converts_kv)
