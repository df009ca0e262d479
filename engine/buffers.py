"""Tensors as bytes for the wire, and back."""

import torch


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, flat; copied to the host first if it is on a GPU. No copy on a CPU."""
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().cpu().view(torch.uint8).numpy().reshape(-1).data


def from_bytes(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A host tensor over `buffer`, not copied: to be read only, and only as long as the buffer lives."""
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
