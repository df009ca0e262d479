"""What `kernel_bench` times: every kernel of a backend on shapes of real models, and others at the same attention."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from experiments.kernel_work import (
    ModelShape,
    Work,
    add_rms_norm_work,
    attention_work,
    move_work,
    rope_store_work,
    silu_mul_work,
)
from kernels.face import Kernels, KvScales, RaggedRows

BLOCK_SIZE: Final = 16
FLOAT8: Final = torch.float8_e4m3fn
_WORKSPACE_BYTES: Final = 256 << 20
"""Scratch memory that FlashInfer asks its caller for."""

Attend = Callable[[], torch.Tensor]
Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """`ours` is what is timed; `others` do the same by other means, by name, and must give the same result."""

    kernel: str
    shape: str
    stored: torch.dtype
    work: Work
    ours: Callable[[], Any]
    others: dict[str, Attend]


@dataclass(frozen=True)
class Bench:
    """What all cases of a model share. `tokens`: of the kernels that are no attention; `formats`: of the pool."""

    model: ModelShape
    kernels: Kernels
    device: torch.device
    decodes: tuple[Rows, ...]
    prefills: tuple[Rows, ...]
    tokens: int
    formats: tuple[torch.dtype, ...]

    def cases(self) -> Iterator[Case]:
        """One at a time: each holds the memory of its pool while it is in use."""
        for stored in self.formats:
            for rows in self.decodes:
                yield self._attention("paged_decode", rows, stored)
            for rows in self.prefills:
                yield self._attention("paged_prefill", rows, stored)
            yield from self._pool_cases(stored)
        yield from self._elementwise_cases()

    def _attention(self, kernel: str, rows: Rows, stored: torch.dtype) -> Case:
        model = self.model
        world = PagedWorld(self, rows, stored)
        attend = getattr(self.kernels, kernel)
        scales, scale = self._scales(stored), model.head_dim**-0.5

        def ours() -> torch.Tensor:
            output: torch.Tensor = attend(
                world.query, world.k_pool, world.v_pool, world.rows, scale, None, None, scales
            )
            return output

        others = {"sdpa": world.sdpa()} if stored == torch.bfloat16 else {}
        if self.device.type == "cuda" and (flashinfer := find_flashinfer()) is not None:
            others["flashinfer"] = world.flashinfer(flashinfer, is_decode=kernel == "paged_decode")
        return Case(kernel, shown(rows), stored, attention_work(model, rows, stored.itemsize), ours, others)

    def _pool_cases(self, stored: torch.dtype) -> Iterator[Case]:
        model, tokens = self.model, self.tokens
        k_pool, v_pool = (self.pool(-(-tokens // BLOCK_SIZE), stored) for _ in range(2))
        slots = torch.randperm(k_pool.shape[0] * BLOCK_SIZE)[:tokens].to(self.device)
        heads = model.num_heads, model.num_kv_heads, model.num_kv_heads
        fused = self.numbers(tokens, sum(heads), model.head_dim)
        query, key, value = torch.split(fused, [*heads], dim=1)
        angles = torch.rand(tokens, model.head_dim // 2, device=self.device)
        cos, sin, scales = angles.cos(), angles.sin(), self._scales(stored)
        gathered = self.kernels.gather_kv(k_pool, v_pool, slots)
        shape = f"{tokens} tokens"

        def rope_store() -> torch.Tensor:
            return self.kernels.rope_store(query, key, value, cos, sin, k_pool, v_pool, slots, scales)

        work = rope_store_work(model, tokens, stored.itemsize)
        yield Case("rope_store", shape, stored, work, rope_store, {})
        work = move_work(model, tokens, stored.itemsize)
        yield Case("gather_kv", shape, stored, work, lambda: self.kernels.gather_kv(k_pool, v_pool, slots), {})
        splice = lambda: self.kernels.splice_kv(k_pool, v_pool, slots, *gathered, 0)  # noqa: E731
        yield Case("splice_kv", shape, stored, work, splice, {})

    def _elementwise_cases(self) -> Iterator[Case]:
        model, tokens = self.model, self.tokens
        x, residual = (self.numbers(tokens, model.hidden) for _ in range(2))
        weight, gate_up = self.numbers(model.hidden), self.numbers(tokens, 2 * model.intermediate)
        shape, dtype = f"{tokens} tokens", torch.bfloat16
        norm = lambda: self.kernels.add_rms_norm(x, residual, weight, 1e-5)  # noqa: E731
        yield Case("add_rms_norm", shape, dtype, add_rms_norm_work(model, tokens), norm, {})
        activate = lambda: self.kernels.silu_mul(gate_up)  # noqa: E731
        yield Case("silu_mul", shape, dtype, silu_mul_work(model, tokens), activate, {})

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def pool(self, num_blocks: int, stored: torch.dtype) -> torch.Tensor:
        return self.numbers(num_blocks, BLOCK_SIZE, self.model.num_kv_heads, self.model.head_dim).to(stored)

    def _scales(self, stored: torch.dtype) -> KvScales | None:
        ones = torch.ones(self.model.num_kv_heads, device=self.device)
        return KvScales(ones, ones) if stored == FLOAT8 else None


class PagedWorld:
    """Rows over a pool whose blocks lie in any order, and the same attention by others."""

    def __init__(self, bench: Bench, rows: Rows, stored: torch.dtype) -> None:
        self._shape = rows
        self._model = bench.model
        self._tables = _scattered_tables(rows)
        num_blocks = sum(len(blocks) for blocks in self._tables)
        self.query = bench.numbers(sum(count for count, _ in rows), bench.model.num_heads, bench.model.head_dim)
        self.k_pool, self.v_pool = (bench.pool(num_blocks, stored) for _ in range(2))
        self.rows = _ragged(rows, self._tables, bench.device)

    def sdpa(self) -> Attend:
        """torch's own over dense copies of K and V, which it is given for nothing; rows must be alike."""
        ((count, context),) = set(self._shape)
        num_rows = len(self._shape)
        blocks = torch.cat(self._tables).to(self.query.device)
        keys, values = (
            pool[blocks].reshape(num_rows, -1, *pool.shape[2:])[:, :context].transpose(1, 2).contiguous()
            for pool in (self.k_pool, self.v_pool)
        )
        query = self.query.view(num_rows, count, *self.query.shape[1:]).transpose(1, 2)
        mask = causal_lower_right(count, context) if count > 1 else None

        def attend() -> torch.Tensor:
            output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            return output.transpose(1, 2).reshape(self.query.shape)

        return attend

    def flashinfer(self, library: Any, *, is_decode: bool) -> Attend:
        """FlashInfer over the very pool. Planning is done beforehand, once for all calls."""
        model, device = self._model, self.query.device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        lengths = torch.tensor([0, *(len(blocks) for blocks in self._tables)])
        indptr = lengths.cumsum(0).to(device, torch.int32)
        indices = torch.cat(self._tables).to(device, torch.int32)
        last = torch.tensor([(context - 1) % BLOCK_SIZE + 1 for _, context in self._shape])
        pages = (indptr, indices, last.to(device, torch.int32))
        sizes = (model.num_heads, model.num_kv_heads, model.head_dim, BLOCK_SIZE)
        dtypes = {"q_data_type": self.query.dtype, "kv_data_type": self.k_pool.dtype}
        if is_decode:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(*pages, *sizes, **dtypes)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(self.rows.query_start, *pages, *sizes, causal=True, **dtypes)
        return lambda: wrapper.run(self.query, (self.k_pool, self.v_pool))


def find_flashinfer() -> Any | None:
    """The library if it is installed: it is no dependency of ours."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        return None


def _scattered_tables(rows: Rows) -> list[torch.Tensor]:
    widths = [-(-context // BLOCK_SIZE) for _, context in rows]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0))
    return list(torch.split(order, widths))


def _ragged(rows: Rows, tables: list[torch.Tensor], device: torch.device) -> RaggedRows:
    counts, contexts = tuple(count for count, _ in rows), tuple(context for _, context in rows)
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    return RaggedRows(
        query_start=torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=padded.to(device, torch.int32),
        host_query_lens=counts,
        host_context_lens=contexts,
    )


def shown(rows: Rows) -> str:
    count, context = rows[0]
    return f"{len(rows)} x {context}" if count == 1 else f"{len(rows)} x {count} of {context}"
