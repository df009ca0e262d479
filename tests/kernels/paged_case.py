"""Rows over a paged pool where everything that must not be read is NaN, and the same attention in float64."""

import math
from collections.abc import Sequence

import torch

from kernels.face import RaggedRows

GARBAGE_BLOCK = 1 << 30
"""A block id far outside of the pool: what stands in a table behind a row's last block."""


class PagedCase:
    """`rows`: (query length, context length) of each. Blocks are scattered; unused slots are NaN, K and V alike."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        seed: int = 0,
    ):
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-context // block_size) for _, context in rows]
        order = torch.randperm(sum(widths) + 3, generator=generator)
        shape = (len(order), block_size, num_kv_heads, head_dim)
        self.k_pool, self.v_pool = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        self.query = torch.randn(sum(q for q, _ in rows), num_heads, head_dim, generator=generator).to(dtype)
        tables = torch.full((len(rows), max(widths) + 2), GARBAGE_BLOCK, dtype=torch.int32)
        self.keys, self.values = [], []
        for index, ((_, context), width) in enumerate(zip(rows, widths, strict=True)):
            blocks, order = order[:width], order[width:]
            tables[index, :width] = blocks
            slots = (blocks.repeat_interleave(block_size) * block_size + torch.arange(block_size).repeat(width))[
                :context
            ]
            for pool, kept in ((self.k_pool, self.keys), (self.v_pool, self.values)):
                kept.append(torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype))
                pool.view(-1, num_kv_heads, head_dim)[slots] = kept[-1]
        self.rows = ragged_rows(rows, tables)
        self.scale = head_dim**-0.5

    def row(self, index: int) -> tuple[torch.Tensor, RaggedRows]:
        """The queries of one row, and that row alone."""
        query_lens, contexts = self.rows.host_query_lens, self.rows.host_context_lens
        begin = sum(query_lens[:index])
        alone = ragged_rows([(query_lens[index], contexts[index])], self.rows.block_tables[index : index + 1])
        return self.query[begin : begin + query_lens[index]], alone

    def expected(self, window: int | None) -> torch.Tensor:
        """[T, H, D] float64, from the definition."""
        outputs, begin = [], 0
        for query_len, keys, values in zip(self.rows.host_query_lens, self.keys, self.values, strict=True):
            query = self.query[begin : begin + query_len]
            outputs.append(exact_attention(query, keys, values, self.scale, window))
            begin += query_len
        return torch.cat(outputs)


def ragged_rows(rows: Sequence[tuple[int, int]], tables: torch.Tensor) -> RaggedRows:
    query_lens, contexts = tuple(q for q, _ in rows), tuple(context for _, context in rows)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return RaggedRows(starts, torch.tensor(contexts, dtype=torch.int32), tables, query_lens, contexts)


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", query.double(), keys) * scale
    places = torch.arange(len(keys) - len(query), len(keys)).unsqueeze(1)
    tokens = torch.arange(len(keys))
    hidden = tokens > places if window is None else (tokens > places) | (tokens <= places - window)
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Worst over all vectors (last dimension): length of the difference over length of the exact vector."""
    difference = (output.double() - expected).norm(dim=-1)
    return (difference / expected.norm(dim=-1).clamp(min=1e-30)).max().item()
