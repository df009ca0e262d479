"""Reads what a compiled kernel costs and does from its machine code, without a device.

NVIDIA: `cuobjdump` and `nvdisasm`, which ship inside of triton's package. AMD: the assembly and its metadata.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import triton

from kernels.triton_backend.compile import Compiled

_MATRIX: Final = ("HMMA", "HGMMA", "UTCHMMA", "v_mfma")
"""Matrix-unit instructions: of a warp, of a warpgroup (sm_90), of the tensor memory (sm_100), of AMD."""
_NVIDIA_OPCODE: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]+)", re.MULTILINE)
_NVIDIA_USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", re.DOTALL)
_AMD_OPCODE: Final = re.compile(r"^\t([a-z]\w+)", re.MULTILINE)


@dataclass(frozen=True)
class MachineCode:
    """`spilled`: bytes of a thread in local memory. `tensor_columns`: of a program in sm_100's tensor memory. `facts`:
    what the instructions show, in the words below.

    HMMA, HGMMA, UTCHMMA, MFMA   products run on the matrix units
    wide                         memory is read in 128-bit instructions, and nothing in less than 32 bits
    unsplit                      nor in 64 bits, which is for 64-bit slots, or half a wide load
    async                        128-bit copies from memory straight to shared memory, ahead of their use
    E4M3                         float8 is read by an instruction of the chip, not by integer arithmetic
    """

    registers: int
    spilled: int
    shared: int
    local_accesses: int
    facts: frozenset[str]
    tensor_columns: int = 0


def read_machine_code(compiled: Compiled, architecture: str) -> MachineCode:
    """Raises subprocess.CalledProcessError if a tool refuses the binary, ValueError if its answer has no figures."""
    read = _read_nvidia if architecture.startswith("sm_") else _read_amd
    return read(compiled)


def _read_nvidia(compiled: Compiled) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.code)
        file.flush()
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        opcodes = Counter(_NVIDIA_OPCODE.findall(_output(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)))
    registers, stack, local = _figures(_NVIDIA_USAGE.search(usage), usage)
    loads = [name for name in opcodes if name.startswith(("LDG.", "LDGSTS."))]
    facts = _matrix_facts(opcodes)
    facts |= _width_facts(loads, wide=".128", half=".64", narrow=(".U8", ".U16", ".S16"))
    if any(name.startswith("LDGSTS.") and ".128" in name for name in loads):
        facts.add("async")
    if any(".E4M3" in name for name in opcodes):
        facts.add("E4M3")
    local_accesses = sum(count for name, count in opcodes.items() if name.startswith(("LDL", "STL")))
    columns = compiled.tensor_columns
    return MachineCode(registers, stack + local, compiled.shared, local_accesses, frozenset(facts), columns)


def _read_amd(compiled: Compiled) -> MachineCode:
    text = compiled.code.decode()
    opcodes = Counter(_AMD_OPCODE.findall(text))
    registers, private, spilled_vectors, spilled_scalars = (
        _figures(re.search(rf"\.{name}:\s+(\d+)", text), name)[0]
        for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
    )
    loads = [name for name in opcodes if re.match(r"(global|buffer|flat)_load", name)]
    facts = _matrix_facts(opcodes)
    facts |= _width_facts(loads, wide="x4", half="x2", narrow=("byte", "short"))
    local_accesses = sum(count for name, count in opcodes.items() if name.startswith("scratch_"))
    spilled = private + 4 * (spilled_vectors + spilled_scalars)
    return MachineCode(registers, spilled, compiled.shared, local_accesses, frozenset(facts))


def _matrix_facts(opcodes: Iterable[str]) -> set[str]:
    found = {unit for name in opcodes for unit in _MATRIX if name.startswith(unit)}
    return {unit.removeprefix("v_").upper() for unit in found}


def _width_facts(loads: list[str], *, wide: str, half: str, narrow: tuple[str, ...]) -> set[str]:
    """32-bit loads are block tables and lengths; any less would be data read element by element."""
    is_wide = any(wide in name for name in loads) and not any(piece in name for name in loads for piece in narrow)
    is_unsplit = is_wide and not any(half in name for name in loads)
    return {fact for fact, holds in (("wide", is_wide), ("unsplit", is_unsplit)) if holds}


def _figures(match: re.Match[str] | None, source: str) -> list[int]:
    if match is None:
        raise ValueError(f"no figures found: {source[:200]}")
    return [int(group) for group in match.groups()]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
