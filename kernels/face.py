"""The one face of all kernel backends: what a forward over a paged KV pool asks for.

Knows pools, slots and ragged rows of queries; no requests, no model, no scheduler.

A pool is one layer's K or V, [num_blocks, block_size, num_kv_heads, head_dim], of the queries' dtype or another one. A
slot is one token's place in it:

    slot = block_id * block_size + offset in the block          (64-bit: the pool may hold more than 2**31 elements)

Slots that no token has been written to may hold anything, NaN included; no backend lets them reach a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.sampling import SamplingKernels


@dataclass(frozen=True)
class KvScales:
    """What one layer's stored numbers are to be multiplied by. A float8 pool comes with scales, no other one does.

    stored = round(number / scale), at most the largest number of the format;     number ~ stored * scale
    """

    key: torch.Tensor  # [G] float32, positive
    value: torch.Tensor  # [G]


@dataclass(frozen=True)
class RaggedRows:
    """Which queries attend to which tokens: R rows of queries, laid end to end, each over its own block table.

    Row r has queries [query_start[r], query_start[r + 1]); they are the last tokens of its context, which takes up
    the first context_lens[r] slots of the blocks in block_tables[r].

        context     0 ........................ context_lens[r]
        queries                     |<-------->|

    The host copies of the lengths let a backend shape its work without waiting for the device.
    """

    query_start: torch.Tensor  # [R + 1] int32
    context_lens: torch.Tensor  # [R] int32
    block_tables: torch.Tensor  # [R, most blocks of a row] int32; what lies behind a row's last block is arbitrary
    host_query_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.host_query_lens)

    @property
    def num_queries(self) -> int:
        return sum(self.host_query_lens)


class PreparedLinear(Protocol):
    """x [T, in_features] to x @ weight.T + bias [T, out_features], for a weight given once."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PreparedBlock(Protocol):
    """A part of a layer that begins with a norm: (what it makes of rms_norm(s), s) for s = x + residual, all [T, N]."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class LayerParts:
    """A pre-norm decoder layer: what it is made of. N: hidden size, D: head size."""

    attention_norm: torch.Tensor  # [N]
    qkv: PreparedLinear
    query_norm: torch.Tensor | None  # [D], of each head before its rotation
    key_norm: torch.Tensor | None
    out: PreparedLinear
    mlp_norm: torch.Tensor  # [N]
    gate_up: PreparedLinear
    down: PreparedLinear
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(frozen=True)
class DecodeStep:
    """What all layers share of a step whose rows have one token each. T: rows."""

    cos: torch.Tensor  # [T, D / 2] float32
    sin: torch.Tensor
    slot_mapping: torch.Tensor  # [T] int64
    rows: RaggedRows
    pool_dtype: torch.dtype


class LayerRun(Protocol):
    """One step's way through the layers, in their order."""

    def __call__(self, index: int, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
        """Computes layer `index`: its K and V go into the pool; `hidden` becomes what its mlp adds and `residual` the
        sum before that, in place."""
        ...


class PreparedLayers(Protocol):
    """All layers of a model."""

    def begin(self, hidden: torch.Tensor, residual: torch.Tensor, step: DecodeStep) -> LayerRun | None:
        """A run over `hidden` and `residual`, both [T, N] and contiguous, which it overwrites. None: this step is for
        the single kernels."""
        ...


class Kernels(Protocol):
    """A backend. T: tokens of the batch; H, G: query and KV heads; D: head size."""

    @property
    def name(self) -> str: ...

    @property
    def capturable(self) -> bool:
        """Whether calls can be recorded in a CUDA graph and repeated on other lengths: the kernels take them from the
        device, and read the host's copies as upper bounds."""
        ...

    @property
    def sampling(self) -> SamplingKernels: ...

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> PreparedLinear:
        """The linear layer of weight [out_features, in_features] and bias [out_features], laid out for this backend.

        `weight` must hold its final values. The result keeps a layout of its own or `weight` itself, never both, so a
        caller that lets go of `weight` holds the numbers once. `wide`: the result is float32 whatever the weight is.
        """
        ...

    def norm_linear(self, norm: torch.Tensor, eps: float, linear: PreparedLinear) -> PreparedBlock:
        """rms_norm by the weight `norm` [N], then a linear that this backend has prepared."""
        ...

    def norm_mlp(self, norm: torch.Tensor, eps: float, gate_up: PreparedLinear, down: PreparedLinear) -> PreparedBlock:
        """rms_norm by the weight `norm` [N], then `down(silu_mul(gate_up(...)))` of linears that this backend has
        prepared."""
        ...

    def prepare_layers(self, layers: Sequence[LayerParts]) -> PreparedLayers | None:
        """All decoder layers of a model as one call each, if this backend has such a call. For steps so small that the
        calls between kernels count; the twin is the same layer out of single kernels (`engine.model.DecoderLayer`)."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / rms(x) * weight` over the last dimension, in float32, rounded to x's dtype before the weight is applied
        (Zhang & Sennrich 2019, arXiv:1910.07467). x: [..., N], weight: [N]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) for s = x + residual. x, residual: [T, N]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of gate_up [T, 2 * N], gate in front; [T, N]."""
        ...

    def rope_store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: KvScales | None = None,
    ) -> torch.Tensor:
        """Rotates queries and keys (RoPE, Su et al. 2021, arXiv:2104.09864; halves as pairs), writes keys and values
        into the pool, and returns the rotated queries.

        query: [T, H, D]; key, value: [T, G, D]; cos, sin: [T, D / 2] float32; slot_mapping: [T] int64. Keys and values
        are rounded to their own dtype, then to the pool's: beyond its largest number they saturate, NaN stays NaN.
        """
        ...

    def paged_decode(
        self,
        query: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        rows: RaggedRows,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        scales: KvScales | None = None,
    ) -> torch.Tensor:
        """Attention of rows that have one query each, or one that is to be ignored and a context of no tokens: zeros.
        Arguments and result as in `paged_prefill`."""
        ...

    def paged_prefill(
        self,
        query: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        rows: RaggedRows,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        scales: KvScales | None = None,
    ) -> torch.Tensor:
        """Causal attention of rows with any number of queries over the pool; [T, H, D] like `query`.

        The query at position p sees the tokens [0, p], or with a window the last `window` of them, itself included.
        Query head h reads KV head h // (H / G). The keys and values of the queries themselves are in the pool already.
        With a `softcap` c > 0, a score s (after `scale`) becomes c * tanh(s / c) (Gemma 2, arXiv:2408.00118).
        """
        ...

    def gather_kv(
        self, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens at `slots` [n] int64, each a contiguous copy [n, G, D]."""
        ...

    def splice_kv(
        self,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_start: int,
    ) -> None:
        """Writes key and value [n, heads, D] to `slots` [n] int64, KV heads [head_start, head_start + heads)."""
        ...
