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


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """The wire's bytes of K or V [tokens, heads, head_dim], uint8 and flat, on the same device."""
    wide = tensor.float()
    scales = (wide.abs().amax(dim=-1) / LARGEST).clamp_min_(_SMALLEST)
    values = (wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return torch.cat((scales.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8)))


def unpack(packed: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """K or V of `shape` [tokens, heads, head_dim] in `dtype`, from the wire's bytes, on the same device."""
    num_scale_bytes = shape[0] * shape[1] * _SCALE_BYTES
    scales = packed[:num_scale_bytes].view(torch.float32).reshape(*shape[:2], 1)
    values = packed[num_scale_bytes:].view(torch.float8_e4m3fn).reshape(shape)
    return (values.float() * scales).to(dtype)


def quantise(tensor: torch.Tensor) -> memoryview:
    """`pack`, into host memory."""
    return as_bytes(pack(tensor))


def dequantise(buffer: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """`unpack` from host memory; a host tensor of its own."""
    return unpack(torch.frombuffer(buffer, dtype=torch.uint8), shape, dtype)
