"""The instruction sets that the native kernels are built for in tests: this CPU's own, and lesser ones that it has."""

import platform
from functools import cache
from pathlib import Path

from kernels.cpu.backend import CpuKernels
from kernels.cpu.build import NATIVE, build, cache_folder
from kernels.cpu.library import open_library

_CPUINFO = Path("/proc/cpuinfo")
_TARGETS = {
    "native": (NATIVE, ()),
    "avx512-bf16": (("-march=cooperlake",), ("avx512_bf16", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")),
    "avx512": (("-march=skylake-avx512",), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")),
    "avx2": (("-march=x86-64-v3",), ("avx2", "fma", "bmi2", "f16c")),
}


def _has(flags: tuple[str, ...]) -> bool:
    if not flags:
        return True
    return platform.machine() == "x86_64" and set(flags) <= set(_CPUINFO.read_text().split())


BUILDS = tuple(name for name, (_, flags) in _TARGETS.items() if _has(flags))


@cache
def cpu_kernels(name: str) -> CpuKernels:
    target, _ = _TARGETS[name]
    return CpuKernels(open_library(build(cache_folder(), target=target)))
