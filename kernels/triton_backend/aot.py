"""Compiles every kernel for every architecture ahead of time, prints what came out, and fails where something is lost.

    python -m kernels.triton_backend.aot [--jobs N] [--only ARCHITECTURE]

Needs no GPU. Exit code 1 if a kernel spills, takes more shared or tensor memory than the chip has, or lost a fact of
EXPECTED.
"""

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kernels.triton_backend.aot_cases import Case, cases
from kernels.triton_backend.compile import compile_launch
from kernels.triton_backend.configs import ARCHITECTURES, FLOAT8_CASTS
from kernels.triton_backend.machine_code import MachineCode, read_machine_code

KIB: Final = 1 << 10
SHARED_LIMIT: Final[Mapping[str, int]] = MappingProxyType(
    {"sm_80": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
)
"""Bytes of one program; sm_80 has 163 KiB, but its rows serve smaller chips too (CUDA C++ Programming Guide, "Compute
Capabilities"; AMD CDNA 3 ISA, local data share)."""

TENSOR_COLUMNS: Final = 512
"""Of a multiprocessor's tensor memory on sm_100, which all of its programs share (PTX ISA, "Tensor Memory")."""

_WIDE: Final = frozenset({"wide"})
_NVIDIA: Final = frozenset({"wide", "unsplit", "async"})
EXPECTED: Final[Mapping[tuple[str, str], frozenset[str]]] = MappingProxyType(
    {
        # Decode's 16 rows are too few for the 64 of a warpgroup, or the 128 of sm_100's unit.
        ("paged_decode", "sm_80"): _NVIDIA | {"HMMA"},
        ("paged_decode", "sm_90"): _NVIDIA | {"HMMA"},
        ("paged_decode", "sm_100"): _NVIDIA | {"HMMA"},
        ("paged_decode", "gfx942"): _WIDE | {"MFMA"},
        ("paged_prefill", "sm_80"): _NVIDIA | {"HMMA"},
        ("paged_prefill", "sm_90"): _NVIDIA | {"HGMMA"},
        ("paged_prefill", "sm_100"): _NVIDIA | {"UTCHMMA"},
        ("paged_prefill", "gfx942"): _WIDE | {"MFMA"},
    }
)
"""Facts that half-precision attention has shown, by kernel and chip. The words are those of `MachineCode`."""
_SMALL: Final = ("combine", "head_norm")
"""Read little, in whatever width; all kernels that are neither here nor above must stream in wide loads."""


@dataclass(frozen=True)
class Report:
    """One line of the table."""

    architecture: str
    kernel: str
    variant: str
    code: MachineCode
    faults: tuple[str, ...]

    def __str__(self) -> str:
        code, verdict = self.code, "; ".join(self.faults) or "ok"
        facts = " ".join(sorted(code.facts))
        return (
            f"{self.architecture:7} {self.kernel:14} {self.variant:58} {code.registers:4} {code.spilled:6} "
            f"{code.shared:7} {code.tensor_columns:5} {code.local_accesses:5}  {facts:33} {verdict}"
        )


HEADER: Final = (
    f"{'chip':7} {'kernel':14} {'case':58} {'regs':>4} {'spills':>6} {'shared':>7} "
    f"{'tmem':>5} {'local':>5}  {'machine code':33} "
)


def expected_facts(kernel: str, variant: str, architecture: str) -> frozenset[str]:
    """What the machine code of a case must show; nothing in float32, which is there to compare with.

    Attention over a float8 pool reads it with an instruction of the chip, where it has one. The copies to a warp's
    matrix unit are of 64 bits then: as many numbers as 128 bits hold of the others.
    """
    if kernel in _SMALL or variant.startswith("fp32") or "KV fp32" in variant:
        return frozenset()
    expected = EXPECTED.get((kernel, architecture), _WIDE)
    if "KV fp8" not in variant or (kernel, architecture) not in EXPECTED:
        return expected
    return expected - {"unsplit"} | ({"E4M3"} if architecture in FLOAT8_CASTS else set())


def faults_of(code: MachineCode, architecture: str, expected: frozenset[str]) -> tuple[str, ...]:
    """What is wrong, in words; empty if nothing is."""
    faults = []
    if code.spilled or code.local_accesses:
        faults.append(f"spills {code.spilled} bytes")
    if code.shared > SHARED_LIMIT[architecture]:
        faults.append(f"shared memory over the chip's {SHARED_LIMIT[architecture]}")
    if code.tensor_columns > TENSOR_COLUMNS:
        faults.append(f"{code.tensor_columns} columns of tensor memory, the chip has {TENSOR_COLUMNS}")
    if "UTCHMMA" in code.facts and not code.tensor_columns:
        faults.append("its columns of tensor memory are not known")
    faults += [f"no longer {fact}" for fact in sorted(expected - code.facts)]
    return tuple(faults)


def check(architecture: str, index: int) -> Report:
    """Compiles and reads the case number `index` of an architecture."""
    case: Case = list(cases(architecture))[index]
    code = read_machine_code(compile_launch(case.launch, architecture), architecture)
    expected = expected_facts(case.kernel, case.variant, architecture)
    return Report(architecture, case.kernel, case.variant, code, faults_of(code, architecture, expected))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile all Triton kernels without a GPU and check their code.")
    parser.add_argument("--jobs", type=int, default=2, help="processes to compile with")
    parser.add_argument("--only", choices=ARCHITECTURES, help="one architecture")
    options = parser.parse_args(arguments)
    architectures = (options.only,) if options.only else ARCHITECTURES
    work = [(name, index) for name in architectures for index in range(sum(1 for _ in cases(name)))]
    failed = 0
    print(HEADER)
    with ProcessPoolExecutor(options.jobs) as pool:
        for report in pool.map(check, *zip(*work, strict=True)):
            print(report, flush=True)
            failed += bool(report.faults)
    print(f"{len(work)} kernels compiled, {failed} with faults")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
