"""Causal attention of ragged prompt chunks over the pool: their own blocks and those of what was computed before.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) over a block table. A tile has QUERIES queries of one row with all GROUP
query heads of one KV head, so a group reads its keys once, and a short chunk still fills the matrix units:

    tile rows   q0h0 q0h1 q0h2 | q1h0 q1h1 q1h2 | ...        queries x heads of the group

The grid is an upper bound that needs no lengths: row r has its tiles from query_start[r] // QUERIES + r on, which each
program inverts by binary search. Keys come in three runs, of which only the outer ones need masks:

    |  window's edge: masked  |  seen by every query: no mask  |  diagonal: masked  |
    low                   left_full                        right_full              high
"""

import torch
import triton
import triton.language as tl

from kernels.face import KvScales, RaggedRows
from kernels.triton_backend.configs import PrefillConfig
from kernels.triton_backend.formats import scale_arguments, unpacked
from kernels.triton_backend.launch import Launch, next_power_of_2
from kernels.triton_backend.softmax import fold_tile, scores_base2, tile_offsets


@triton.jit
def _row_of_tile(query_start: tl.tensor, num_rows: tl.tensor, tile: tl.tensor, QUERIES: tl.constexpr) -> tl.tensor:
    """The last row whose tiles start at or before `tile`."""
    low, high = num_rows * 0, num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        starts_before = tl.load(query_start + middle) // QUERIES + middle <= tile
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    return low


@triton.jit
def _attend_run(
    sums: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    queries: tl.tensor,
    query_positions: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    low: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Folds the tokens [begin, end) in; unless MASKED, every query sees all of them. None in front of `low` is read."""
    dims = tl.arange(0, DIM)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        inside = (positions >= low) & (positions < end) if MASKED else positions >= 0
        offsets = tile_offsets(positions, inside, table, stride_block, stride_token, BLOCK_SIZE)
        k_places, v_places = offsets[None, :] + dims[:, None], offsets[:, None] + dims[None, :]
        if MASKED:
            # V is masked as well as the scores: what lies in an unused slot may be NaN, and 0 * NaN is NaN.
            keys = tl.load(k_pool + k_places, mask=inside[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
            values = tl.load(v_pool + v_places, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        else:
            keys = tl.load(k_pool + k_places, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            values = tl.load(v_pool + v_places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        keys, values = unpacked(keys, queries.dtype), unpacked(values, queries.dtype)
        scores = scores_base2(tl.dot(queries, keys, input_precision=PRECISION), scale, SOFTCAP)
        if MASKED:
            visible = inside[None, :] & (positions[None, :] <= query_positions[:, None])
            if WINDOW > 0:
                visible = visible & (positions[None, :] > query_positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        sums, top, weight = fold_tile(scores, values, sums, top, weight, PRECISION)
    return sums, top, weight


# What changes from step to step must not bring a new compilation.
@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def paged_prefill_kernel(
    output: tl.tensor,
    query: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    query_start: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    num_rows: tl.tensor,
    stride_query: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (upper bound of tiles, KV heads). A tile has ROWS >= QUERIES * GROUP rows; DIM: HEAD_DIM padded."""
    # From the back: a row's last tiles see the most tokens, and should not be the ones that end the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    value_scale = 1.0
    if k_scale is not None:
        # One KV head a program, so its scales are factors of all scores and of all results.
        scale *= tl.load(k_scale + kv_head)
        value_scale = tl.load(v_scale + kv_head)
    row = _row_of_tile(query_start, num_rows, tile, QUERIES)
    row_begin = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - row_begin
    first = (tile - row_begin // QUERIES - row) * QUERIES
    if first < query_len:
        context = tl.load(context_lens + row)
        before = context - query_len  # tokens in front of the row's first query
        lanes, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        indices = first + lanes // GROUP
        real = ((lanes < QUERIES * GROUP) & (indices < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
        heads = kv_head * GROUP + lanes % GROUP
        tokens = (row_begin + indices).to(tl.int64)
        inner = heads[:, None] * HEAD_DIM + dims[None, :]
        queries = tl.load(query + tokens[:, None] * stride_query + inner, mask=real, other=0.0)
        positions = before + indices
        high = before + tl.minimum(first + QUERIES, query_len)
        low = high * 0
        begin = high * 0
        left_full = high * 0
        if WINDOW > 0:
            low = tl.maximum(before + first + 1 - WINDOW, 0)
            begin = low // TILE * TILE
            left_full = tl.cdiv(tl.maximum(high - WINDOW, 0), TILE) * TILE
        right_full = (before + first + 1) // TILE * TILE
        table = block_tables + row.to(tl.int64) * stride_table
        k_head, v_head = k_pool + kv_head * stride_head, v_pool + kv_head * stride_head
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, DIM], tl.float32)
        if WINDOW > 0:
            sums, top, weight = _attend_run(
                sums, top, weight, queries, positions, k_head, v_head, table, begin, tl.minimum(left_full, high), low,
                stride_block, stride_token, scale, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, PRECISION, True,
            )  # fmt: skip
        sums, top, weight = _attend_run(
            sums, top, weight, queries, positions, k_head, v_head, table, left_full, right_full, low,
            stride_block, stride_token, scale, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, PRECISION, False,
        )  # fmt: skip
        sums, top, weight = _attend_run(
            sums, top, weight, queries, positions, k_head, v_head, table, tl.maximum(left_full, right_full), high, low,
            stride_block, stride_token, scale, HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, PRECISION, True,
        )  # fmt: skip
        result = sums / tl.where(weight > 0.0, weight, 1.0)[:, None] * value_scale
        tl.store(
            output + tokens[:, None] * (NUM_HEADS * HEAD_DIM) + inner, result.to(output.dtype.element_ty), mask=real
        )


def prefill_launch(
    output: torch.Tensor,
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: RaggedRows,
    scale: float,
    window: int | None,
    softcap: float | None,
    scales: KvScales | None,
    config: PrefillConfig,
) -> Launch:
    """The launch that fills `output` [T, H, D]."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = k_pool.shape[2]
    group = num_heads // num_kv_heads
    tile_rows = max(config.rows, next_power_of_2(group))
    queries = tile_rows // group
    arguments = {
        "output": output,
        "query": query,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "query_start": rows.query_start,
        "context_lens": rows.context_lens,
        "block_tables": rows.block_tables,
        "num_rows": len(rows),
        "stride_query": query.stride(0),
        "stride_table": rows.block_tables.stride(0),
        "stride_block": k_pool.stride(0),
        "stride_token": k_pool.stride(1),
        "stride_head": k_pool.stride(2),
        "scale": scale,
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "QUERIES": queries,
        "ROWS": tile_rows,
        "HEAD_DIM": head_dim,
        "DIM": max(16, next_power_of_2(head_dim)),
        "BLOCK_SIZE": k_pool.shape[1],
        "TILE": config.tile,
        "WINDOW": window or 0,
        "SOFTCAP": softcap or 0.0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        **scale_arguments(scales),
    }
    grid = (num_tokens // queries + len(rows), num_kv_heads)
    return Launch(paged_prefill_kernel, grid, arguments, config.num_warps, config.num_stages)
