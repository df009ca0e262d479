"""Linear layers whose weights are laid out once for the small-row product of `source/linear.h`, and blocks around them.

The same product serves any number of rows: at many rows it runs at the speed of the best library product, so no
second layout of the weight is kept.
"""

import ctypes
from typing import Final

import torch

from kernels.cpu.library import LinearFunctions, PackedWeights
from kernels.face import PreparedBlock

PANEL: Final = 32
"""Columns of a panel, as in `source/panels.h`."""
FEW_ROWS: Final = 64
"""Up to so many rows a block is one call, with its intermediate results in memory that the library keeps. With more,
calls cost nothing beside the products, and the memory would."""


class PackedLinear:
    """Implements `kernels.face.PreparedLinear` for a bfloat16 weight. Holds a packed copy, not the weight itself."""

    def __init__(
        self, functions: LinearFunctions, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool
    ) -> None:
        weight = weight.detach().contiguous()
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // PANEL)
        self._packed = torch.empty(panels * PANEL * self.in_features, dtype=weight.dtype)
        functions.pack(weight.data_ptr(), *weight.shape, self._packed.data_ptr(), torch.get_num_threads())
        self._bias = None if bias is None else bias.detach().contiguous()
        bias_address = None if self._bias is None else self._bias.data_ptr()
        # Lives as long as this object: the reference points into it.
        self.weights = PackedWeights(self._packed.data_ptr(), bias_address, self.out_features, self.in_features)
        self.reference = ctypes.byref(self.weights)
        self._product = functions.linear
        self._wide = wide
        self._out_dtype = torch.float32 if wide else torch.bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.shape[1] == self.in_features, (tuple(x.shape), self.in_features)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=self._out_dtype)
        threads = torch.get_num_threads()
        self._product(self.reference, x.data_ptr(), rows, x.stride(0), out.data_ptr(), self._wide, threads)
        return out


class _FewRowsBlock:
    """A block that is one call for few rows, and `composed` for more. Implements `kernels.face.PreparedBlock`."""

    def __init__(self, norm: torch.Tensor, eps: float, composed: PreparedBlock, out_features: int) -> None:
        self._norm = norm.detach().contiguous()
        assert self._norm.dtype == torch.bfloat16, norm.dtype
        self._eps = eps
        self._composed = composed
        self._out_features = out_features

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.shape[0]
        if rows > FEW_ROWS:
            return self._composed(x, residual)
        x, residual = x.contiguous(), residual.contiguous()
        assert x.dtype == residual.dtype == torch.bfloat16, (x.dtype, residual.dtype)
        assert x.shape == residual.shape == (rows, len(self._norm)), (x.shape, residual.shape, self._norm.shape)
        total = torch.empty_like(x)
        out = torch.empty(rows, self._out_features, dtype=torch.bfloat16)
        self._run(x.data_ptr(), residual.data_ptr(), total.data_ptr(), out.data_ptr(), rows, torch.get_num_threads())
        return out, total

    def _run(self, x: int, residual: int, total: int, out: int, rows: int, threads: int) -> None:
        """All but the last two are addresses."""
        raise NotImplementedError


class FusedNormLinear(_FewRowsBlock):
    """`linear(rms_norm(x + residual))`."""

    def __init__(
        self, functions: LinearFunctions, norm: torch.Tensor, eps: float, linear: PackedLinear, composed: PreparedBlock
    ) -> None:
        super().__init__(norm, eps, composed, linear.out_features)
        assert linear.in_features == len(norm), (linear.in_features, norm.shape)
        self._linear = linear
        self._function = functions.norm_linear

    def _run(self, x: int, residual: int, total: int, out: int, rows: int, threads: int) -> None:
        norm = self._norm.data_ptr()
        self._function(self._linear.reference, norm, self._eps, x, residual, total, out, rows, threads)


class FusedMlp(_FewRowsBlock):
    """`down(silu_mul(gate_up(rms_norm(x + residual))))`."""

    def __init__(
        self,
        functions: LinearFunctions,
        norm: torch.Tensor,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
        composed: PreparedBlock,
    ) -> None:
        super().__init__(norm, eps, composed, down.out_features)
        assert gate_up.in_features == len(norm), (gate_up.in_features, norm.shape)
        assert gate_up.out_features == 2 * down.in_features, (gate_up.out_features, down.in_features)
        self._gate_up, self._down = gate_up, down
        self._function = functions.norm_mlp

    def _run(self, x: int, residual: int, total: int, out: int, rows: int, threads: int) -> None:
        gate_up, down, norm = self._gate_up.reference, self._down.reference, self._norm.data_ptr()
        self._function(gate_up, down, norm, self._eps, x, residual, total, out, rows, threads)
