"""Blocks of a layer out of single kernels: what any backend can do, and the twin of those that do them in one call."""

from dataclasses import dataclass

import torch

from kernels.face import Kernels, PreparedLinear


@dataclass(frozen=True)
class ComposedNormLinear:
    """`linear(rms_norm(x + residual))`. Implements `kernels.face.PreparedBlock`."""

    kernels: Kernels
    norm: torch.Tensor
    eps: float
    linear: PreparedLinear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self.kernels.add_rms_norm(x, residual, self.norm, self.eps)
        return self.linear(normed), total


@dataclass(frozen=True)
class ComposedMlp:
    """`down(silu_mul(gate_up(rms_norm(x + residual))))`. Implements `kernels.face.PreparedBlock`."""

    kernels: Kernels
    norm: torch.Tensor
    eps: float
    gate_up: PreparedLinear
    down: PreparedLinear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self.kernels.add_rms_norm(x, residual, self.norm, self.eps)
        return self.down(self.kernels.silu_mul(self.gate_up(normed))), total
