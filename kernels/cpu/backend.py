"""The native CPU backend: the face of `kernels` over the compiled library.

bfloat16 and float32 are native. float16 goes to the reference call by call: no CPU that we know of has a float16
product worth it. So does attention with a soft cap, which no architecture served here has. Threads are torch's
(`torch.set_num_threads`), asked for at every call.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch

from kernels.composed import ComposedMlp, ComposedNormLinear
from kernels.cpu.build import build, cache_folder
from kernels.cpu.layers import NativeLayers
from kernels.cpu.library import Library, TypedFunctions, check_layout, open_library
from kernels.cpu.linear import FusedMlp, FusedNormLinear, PackedLinear
from kernels.cpu.sampling import NativeSampling
from kernels.face import KvScales, LayerParts, PreparedBlock, PreparedLayers, PreparedLinear, RaggedRows
from kernels.reference import ReferenceKernels
from kernels.sampling import SamplingKernels

_OWN_FORMAT: Final = "kernels.select gives pools of another format to the reference"


class CpuKernels:
    """Implements `kernels.face.Kernels`; the contracts are documented there."""

    name = "cpu"
    capturable = False

    def __init__(self, library: Library) -> None:
        self._library = library
        self._reference = ReferenceKernels()
        self.sampling: SamplingKernels = NativeSampling(library)
        self._typed: Mapping[torch.dtype, TypedFunctions] = MappingProxyType(
            {torch.bfloat16: library.bf16, torch.float32: library.f32}
        )

    @classmethod
    def native(cls) -> "CpuKernels":
        """For this machine, compiled now if need be. Raises UnavailableBackendError."""
        return cls(open_library(build(cache_folder())))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> PreparedLinear:
        """A packed copy for bfloat16 on a CPU that multiplies it; else torch's own product over `weight` itself."""
        linears = self._library.linears
        if weight.dtype == torch.bfloat16 and linears is not None and weight.shape[1] % 2 == 0:
            return PackedLinear(linears, weight, bias, wide=wide)
        return self._reference.prepare_linear(weight, bias, wide=wide)

    def norm_linear(self, norm: torch.Tensor, eps: float, linear: PreparedLinear) -> PreparedBlock:
        composed, linears = ComposedNormLinear(self, norm, eps, linear), self._library.linears
        if linears is not None and isinstance(linear, PackedLinear):
            return FusedNormLinear(linears, norm, eps, linear, composed)
        return composed

    def norm_mlp(self, norm: torch.Tensor, eps: float, gate_up: PreparedLinear, down: PreparedLinear) -> PreparedBlock:
        composed, linears = ComposedMlp(self, norm, eps, gate_up, down), self._library.linears
        if linears is not None and isinstance(gate_up, PackedLinear) and isinstance(down, PackedLinear):
            return FusedMlp(linears, norm, eps, gate_up, down, composed)
        return composed

    def prepare_layers(self, layers: Sequence[LayerParts]) -> PreparedLayers | None:
        linears = self._library.linears
        if linears is not None and NativeLayers.takes(layers):
            return NativeLayers(linears.decode_layer, layers)
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        typed = self._typed.get(x.dtype)
        if typed is None:
            return self._reference.rms_norm(x, weight, eps)
        rows = _as_rows(x)
        outer, inner, size = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        check_layout(x.dtype, weight)
        typed.rms_norm(
            rows.data_ptr(), None, weight.data_ptr(), None, out.data_ptr(),
            outer, inner, rows.stride(0), rows.stride(1), size, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        typed = self._typed.get(x.dtype)
        if typed is None:
            return self._reference.add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        check_layout(x.dtype, residual, weight)
        tokens, size = x.shape
        out, total = torch.empty_like(x), torch.empty_like(x)
        typed.rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(),
            tokens, 1, size, size, size, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        typed = self._typed.get(gate_up.dtype)
        if typed is None:
            return self._reference.silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, size, dtype=gate_up.dtype)
        typed.silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, size, torch.get_num_threads())
        return out

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
        assert scales is None, _OWN_FORMAT
        typed = self._typed.get(query.dtype)
        if typed is None:
            return self._reference.rope_store(query, key, value, cos, sin, k_pool, v_pool, slot_mapping)
        query, key, value = _heads_side_by_side(query), _heads_side_by_side(key), _heads_side_by_side(value)
        check_layout(query.dtype, k_pool, v_pool)
        check_layout(torch.float32, cos, sin)
        check_layout(torch.int64, slot_mapping)
        assert key.dtype == value.dtype == query.dtype, (query.dtype, key.dtype, value.dtype)
        tokens, heads, head_dim = query.shape
        rotated = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
        typed.rope_store(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), cos.data_ptr(), sin.data_ptr(), rotated.data_ptr(),
            k_pool.data_ptr(), v_pool.data_ptr(), slot_mapping.data_ptr(), tokens, heads, key.shape[1], head_dim,
            query.stride(0), key.stride(0), value.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return rotated

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
        """One kernel serves both: a row of one query is cut into segments of tokens there."""
        assert scales is None, _OWN_FORMAT
        if query.dtype not in self._typed or softcap is not None:
            return self._reference.paged_decode(query, k_pool, v_pool, rows, scale, window, softcap)
        return self.paged_prefill(query, k_pool, v_pool, rows, scale, window)

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
        assert scales is None, _OWN_FORMAT
        typed = self._typed.get(query.dtype)
        if typed is None or softcap is not None:
            return self._reference.paged_prefill(query, k_pool, v_pool, rows, scale, window, softcap)
        query = query.contiguous()
        check_layout(query.dtype, k_pool, v_pool)
        check_layout(torch.int32, rows.query_start, rows.context_lens)
        tables = rows.block_tables
        assert tables.dtype == torch.int32, tables.dtype
        assert tables.stride(1) == 1, tables.stride()
        out = torch.empty_like(query)
        _, block_size, kv_heads, head_dim = k_pool.shape
        typed.attention(
            query.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(), tables.data_ptr(),
            tables.stride(0), rows.query_start.data_ptr(), rows.context_lens.data_ptr(), len(rows), query.shape[1],
            kv_heads, head_dim, block_size, scale, window or 0, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gather_kv(
        self, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Any dtype: tokens are bytes here."""
        check_layout(torch.int64, slots)
        return self._gather(k_pool, slots), self._gather(v_pool, slots)

    def _gather(self, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        assert pool.is_contiguous(), pool.stride()
        count = slots.shape[0]  # len() of a tensor takes longer than to copy a token
        out = pool.new_empty((count, pool.shape[2], pool.shape[3]))
        self._library.gather(pool.data_ptr(), slots.data_ptr(), out.data_ptr(), count, _token_bytes(pool))
        return out

    def splice_kv(
        self,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_start: int,
    ) -> None:
        """Any dtype: tokens are bytes here."""
        check_layout(torch.int64, slots)
        self._splice(k_pool, slots, key.contiguous(), head_start)
        self._splice(v_pool, slots, value.contiguous(), head_start)

    def _splice(self, pool: torch.Tensor, slots: torch.Tensor, source: torch.Tensor, head_start: int) -> None:
        check_layout(source.dtype, pool)
        head_bytes = pool.shape[3] * pool.element_size()
        self._library.splice(
            pool.data_ptr(), slots.data_ptr(), source.data_ptr(), slots.shape[0], _token_bytes(pool),
            head_start * head_bytes, source.shape[1] * head_bytes,
        )  # fmt: skip


def _token_bytes(pool: torch.Tensor) -> int:
    return pool.shape[2] * pool.shape[3] * pool.element_size()


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., N] as [outer, inner, N] with its numbers side by side; a view wherever strides allow."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    return x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])


def _heads_side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] as it is if each token's heads lie side by side, as in a slice of a fused product."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
