"""A linear layer whose weight is laid out once for the small-row product of `source/linear.cpp`.

The same product serves any number of rows: at many rows it runs at the speed of the best library product, so no
second layout of the weight is kept.
"""

from typing import Final

import torch

from kernels.cpu.library import Library

PANEL: Final = 32
"""Columns of a panel, as in `source/panels.h`."""


class PackedLinear:
    """Implements `kernels.face.PreparedLinear` for a bfloat16 weight. Holds a packed copy, not the weight itself."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool) -> None:
        assert library.pack is not None, "this CPU does not multiply bfloat16"
        assert library.linear is not None, "pack and linear come together"
        weight = weight.detach().contiguous()
        self._out_features, self._in_features = weight.shape
        panels = -(-self._out_features // PANEL)
        self._packed = torch.empty(panels * PANEL * self._in_features, dtype=weight.dtype)
        library.pack(weight.data_ptr(), *weight.shape, self._packed.data_ptr(), torch.get_num_threads())
        self._bias = None if bias is None else bias.detach().contiguous()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()
        self._product = library.linear
        self._wide = wide
        self._out_dtype = torch.float32 if wide else torch.bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.shape[1] == self._in_features, (tuple(x.shape), self._in_features)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self._out_features, dtype=self._out_dtype)
        self._product(
            x.data_ptr(), rows, x.stride(0), self._packed.data_ptr(), self._bias_address,
            self._out_features, self._in_features, out.data_ptr(), self._wide, torch.get_num_threads(),
        )  # fmt: skip
        return out
