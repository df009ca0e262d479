"""Compiles a launch for an architecture that need not be there, specialised as a call on that device would be."""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton_backend.launch import Launch

_ALIGNMENT: Final = 16
"""Bytes of a pointer, or a factor of an integer, that Triton specialises for. torch aligns all tensors to more."""
_TYPE_NAMES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Compiled:
    """`shared`: bytes of shared memory a program; `tensor_columns`: of sm_100's tensor memory, 0 on chips without it.
    `code`: the binary for NVIDIA, assembly for AMD."""

    shared: int
    tensor_columns: int
    code: bytes


def target_of(architecture: str) -> GPUTarget:
    """Triton's name for a row of the table in `configs`."""
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def compile_launch(launch: Launch, architecture: str) -> Compiled:
    """Compiles the kernel for the launch's arguments, whose tensors may be on the meta device."""
    target = target_of(architecture)
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=target, options=options)
    code = compiled.asm["cubin"] if target.backend == "cuda" else compiled.asm["amdgcn"].encode()
    columns = getattr(compiled.metadata, "tmem_size", None) or 0  # AMD's compiler has no such figure
    return Compiled(compiled.metadata.shared, columns, code)


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """(types, constants, alignments) as a just-in-time call derives them: None and integers of 1 become constants, and
    a factor of 16 is known, unless the kernel forbids the latter two."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (not free and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        if not free and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % _ALIGNMENT == 0)):
            attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    return signature, constants, attributes


def _type_of(value: torch.Tensor | float) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPE_NAMES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return "fp32"
