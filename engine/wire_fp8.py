"""KV as float8_e4m3fn on the wire: half the bytes of bfloat16, and an error that is stated.

Each head of each token has a scale s = max|x| / 448 of its own, so that a token with large values costs others
nothing. A value x = m * 2^e is rounded to 3 bits of mantissa: it is off by at most |x| / 16, or by s / 1024 where it is
tiny beside its head's largest (OCP 8-bit Floating Point Specification, e4m3). The bytes of one body:

    |<- scales, float32 [tokens, heads] ->|<- values, float8_e4m3fn [tokens, heads, head_dim] ->|
"""

from typing import Final

import torch

from engine.buffers import as_bytes

LARGEST: Final = 448.0
"""The largest finite float8_e4m3fn."""
_SMALLEST: Final = torch.finfo(torch.float32).tiny
"""A head of zeros is divided by this, and one of numbers so small that its scale would be no normal number."""
_SCALE_BYTES: Final = 4


def quantise(tensor: torch.Tensor) -> memoryview:
    """The wire's bytes of K or V [tokens, heads, head_dim], on any device."""
    wide = tensor.float()
    scales = (wide.abs().amax(dim=-1) / LARGEST).clamp_min_(_SMALLEST)
    values = (wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    parts = (scales.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8))
    return as_bytes(torch.cat(parts))


def dequantise(buffer: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """K or V of `shape` [tokens, heads, head_dim] in `dtype`, from the wire's bytes; a host tensor of its own."""
    num_scales = shape[0] * shape[1]
    scales = torch.frombuffer(buffer, dtype=torch.float32, count=num_scales)
    values = torch.frombuffer(buffer, dtype=torch.float8_e4m3fn, offset=num_scales * _SCALE_BYTES)
    return (values.reshape(shape).float() * scales.reshape(*shape[:2], 1)).to(dtype)
