"""Which devices the backend serves, and with which rows of the table of configs."""

from typing import Final

import torch
import triton

from kernels.errors import UnavailableBackendError
from kernels.face import Kernels
from kernels.triton_backend.backend import TritonKernels

OLDEST_CAPABILITY: Final = (8, 0)
"""Compute capability of the first NVIDIA chips with matrix units for bfloat16."""


def check_device(device: torch.device) -> None:
    """Raises UnavailableBackendError for a device that the kernels cannot run on."""
    if device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            raise UnavailableBackendError("triton kernels need a GPU; on a CPU only its interpreter runs them, slowly")
        return
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        raise UnavailableBackendError("triton kernels need a GPU of compute capability 8.0 or more")


def triton_kernels(device: torch.device) -> Kernels:
    """The backend with the configs of the device's architecture."""
    return TritonKernels(architecture_of(device))


def architecture_of(device: torch.device) -> str:
    """The rows of the table that serve a device: its own, or else those of sm_80, which keep to what every later chip
    has (99 KiB of shared memory on sm_86, sm_89 and sm_120). In the interpreter any row will do."""
    if device.type == "cpu":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
