"""Between the format of a pool and the one that products are computed in.

float8 e4m3 (OCP 8-bit Floating Point Specification, 2023) has no infinity; its codes are

    sign 1 | exponent 4 | fraction 3        0x7E = 448 is the largest number, 0x7F is NaN, exponents are biased by 7

It is packed by integer arithmetic everywhere, which rounds as `kernels.reference` does on every chip, and unpacked by
the instruction of chips that have one. For the others, and for packing, a launch passes the pool as bytes: Triton
refuses the type itself before sm_89.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.face import KvScales
from kernels.triton_backend.configs import FLOAT8_CASTS

LARGEST: Final = tl.constexpr(448.0)
SMALLEST_NORMAL: Final = tl.constexpr(0.015625)
"""2**-6. Below it numbers are whole multiples of 2**-9."""
CODE_BIAS: Final = tl.constexpr((127 - 7) << 3)
"""The difference of the exponents' biases, in steps of a code."""
ULP_IS_SMALLEST: Final = tl.constexpr(16384.0)
"""2**14: float32 numbers from here to 2**15 are multiples of 2**-9, so adding it rounds to those."""
BIAS_TO_FLOAT32: Final = tl.constexpr(2.0**120)
NAN_CODE: Final = tl.constexpr(0x7F)


@triton.jit
def unpacked(stored: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Stored numbers as `dtype`: themselves, a cast, or bytes read as e4m3."""
    return _read_e4m3(stored, dtype) if stored.dtype == tl.uint8 else stored.to(dtype)


@triton.jit
def _read_e4m3(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Codes as numbers, all of which every `dtype` holds exactly.

    Exponent and fraction take their places in the wider format, and a product makes up for its larger bias: so numbers
    below 2**-6 need no case of their own. Of all codes NaN alone carries into bit 7 if 1 is added, which a product
    spreads over the exponent: comparing each number would take more registers than some chips have.
    """
    if dtype == tl.float16:
        halves = codes.to(tl.uint16)
        is_nan = ((halves & 0x7F) + 1) & 0x80
        bits = ((halves & 0x80) << 8) | ((halves & 0x7F) << 7) | (is_nan * 0xF8)
        numbers = bits.to(tl.float16, bitcast=True) * 256.0
    else:
        wide = codes.to(tl.uint32)
        is_nan = ((wide & 0x7F) + 1) & 0x80
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20) | (is_nan * 0xFF0000)
        numbers = bits.to(tl.float32, bitcast=True) * BIAS_TO_FLOAT32
        if dtype == tl.bfloat16:  # the upper half; the lower one is 0
            numbers = (numbers.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return numbers


@triton.jit
def packed(numbers: tl.tensor, dtype: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Numbers in a pool's format: themselves, e4m3 as bytes, or a cast of what LIMIT leaves of them. NaN stays NaN."""
    if dtype == tl.uint8:
        stored = _e4m3(numbers.to(tl.float32))
    elif numbers.dtype == dtype:
        stored = numbers
    else:
        wide = numbers.to(tl.float32)
        stored = tl.where(wide != wide, wide, tl.minimum(tl.maximum(wide, -LIMIT), LIMIT)).to(dtype)
    return stored


@triton.jit
def _e4m3(wide: tl.tensor) -> tl.tensor:
    """float32 to the nearest code, even if there are two, at most LARGEST."""
    size = tl.minimum(tl.abs(wide), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Half of what 20 bits less can tell apart, and a bit less than that if it has to come down to an even code.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - CODE_BIAS
    small = (size + ULP_IS_SMALLEST).to(tl.int32, bitcast=True) & 0xF
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(size < SMALLEST_NORMAL, small, normal)
    return (sign | tl.where(wide != wide, NAN_CODE, code)).to(tl.uint8)


def scale_arguments(scales: KvScales | None) -> dict[str, torch.Tensor | None]:
    """A launch's arguments `k_scale` and `v_scale`; None is known to the compiler."""
    if scales is None:
        return {"k_scale": None, "v_scale": None}
    return {"k_scale": scales.key, "v_scale": scales.value}


def readable(pool: torch.Tensor, architecture: str) -> torch.Tensor:
    """A pool as the attention kernels read it on a chip."""
    return pool if architecture in FLOAT8_CASTS else as_bytes(pool)


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """A float8 pool as bytes, any other as it is."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
