"""Attention of rows with one query each: keys split into segments, then the segments of a row combined.

Flash-decoding (Dao et al. 2023): a row's visible tokens are cut into segments, each the work of one program, so that a
long row is spread over the device and doesn't hold the grid. One launch takes all rows:

    rows         r0: 3 segments      r1: 1     r2: 0      r3: 2
    items      | 0    1    2     |   3     |          |   4    5   |    item -> (row, segment) by a scan of lengths

Programs take items in turn. How a row is cut depends on its own length alone, so its result has the same bits in any
batch. A row of one segment writes its result; the others leave (result, log-sum-exp) of each segment in float32, and
the second kernel adds them up. The query heads that share a KV head are the rows of one tile: the keys are read once,
and the products fill the matrix units. Nothing here waits for the device: the grid may be larger or smaller than the
number of items.
"""

import torch
import triton
import triton.language as tl

from kernels.face import KvScales, RaggedRows
from kernels.triton_backend.configs import DecodeConfig
from kernels.triton_backend.formats import scale_arguments, unpacked
from kernels.triton_backend.launch import Launch, next_power_of_2
from kernels.triton_backend.softmax import fold_tile, scores_base2, tile_offsets

SCAN_CHUNK = 128
"""Rows whose lengths a program scans at a time."""
COMBINE_CHUNK = 16
"""Segments that are added up at a time."""
MAX_SEGMENTS = 64
"""Of a row: bounds the scratch memory. Rows of more than 64 shortest segments get longer ones."""


def segment_length(visible: int, config: DecodeConfig) -> int:
    """Tokens in a segment of a row that sees `visible` tokens; the kernels' `_segment_length` is the same."""
    tiles = -(-visible // (MAX_SEGMENTS * config.tile))
    return max(config.segment, tiles * config.tile)


def num_segments(context: int, window: int | None, config: DecodeConfig) -> int:
    """Segments of a row with `context` tokens; none if it has no tokens."""
    visible = context if window is None else min(context, window)
    return -(-visible // segment_length(visible, config))


@triton.jit
def _first_visible(context: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    return first


@triton.jit
def _segment_length(visible: tl.tensor, SEGMENT: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    return tl.maximum(tl.cdiv(visible, MOST * TILE) * TILE, SEGMENT)


@triton.jit
def _count(
    context_lens: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Segments of each of `rows`, 0 past the last one."""
    context = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    visible = context - _first_visible(context, WINDOW)
    return tl.cdiv(visible, _segment_length(visible, SEGMENT, MOST, TILE))


@triton.jit
def _items_before(
    context_lens: tl.tensor,
    end_row: tl.tensor,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Segments of the rows in front of `end_row`."""
    total = end_row * 0
    for start in range(0, end_row, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        total += tl.sum(_count(context_lens, rows, end_row, WINDOW, SEGMENT, MOST, TILE), 0)
    return total


@triton.jit
def _row_of_item(
    context_lens: tl.tensor,
    num_rows: tl.tensor,
    item: tl.tensor,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(row that an item belongs to, that row's first item): rows that end at or before the item lie in front of it."""
    row, first, total = num_rows * 0, num_rows * 0, num_rows * 0
    for start in range(0, num_rows, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        counts = _count(context_lens, rows, num_rows, WINDOW, SEGMENT, MOST, TILE)
        in_front = total + tl.cumsum(counts, 0) <= item
        row += tl.sum(in_front.to(tl.int32), 0)
        first += tl.sum(tl.where(in_front, counts, 0), 0)
        total += tl.sum(counts, 0)
    return row, first


@triton.jit
def _attend_segment(
    queries: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(attention of queries [HEADS, DIM] over tokens [begin, end), its log-sum-exp in base 2), float32."""
    dims = tl.arange(0, DIM)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, DIM], tl.float32)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        inside = positions < end
        offsets = tile_offsets(positions, inside, table, stride_block, stride_token, BLOCK_SIZE)
        # V is masked as well as the scores: what lies in an unused slot may be NaN, and 0 * NaN is NaN.
        real_k = inside[None, :] & (dims < HEAD_DIM)[:, None]
        real_v = inside[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_pool + offsets[None, :] + dims[:, None], mask=real_k, other=0.0)
        values = tl.load(v_pool + offsets[:, None] + dims[None, :], mask=real_v, other=0.0)
        keys, values = unpacked(keys, queries.dtype), unpacked(values, queries.dtype)
        products = tl.dot(queries, keys, input_precision=PRECISION)
        scores = tl.where(inside[None, :], scores_base2(products, scale, SOFTCAP), float("-inf"))
        sums, top, weight = fold_tile(scores, values, sums, top, weight, PRECISION)
    return sums / weight[:, None], top + tl.log2(weight)


# What changes from step to step must not bring a new compilation.
@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def paged_decode_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
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
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (any number, KV heads). HEADS and DIM: GROUP and HEAD_DIM, padded to what the matrix units take."""
    kv_head = tl.program_id(1)
    lanes, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    heads = kv_head * GROUP + lanes
    real = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    value_scale = 1.0
    if k_scale is not None:
        # One KV head a program, so its scales are factors of all scores and of all results.
        scale *= tl.load(k_scale + kv_head)
        value_scale = tl.load(v_scale + kv_head)
    total = _items_before(context_lens, num_rows, WINDOW, SEGMENT, MOST, TILE, CHUNK)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row, first = _row_of_item(context_lens, num_rows, item, WINDOW, SEGMENT, MOST, TILE, CHUNK)
        context = tl.load(context_lens + row)
        low = _first_visible(context, WINDOW)
        length = _segment_length(context - low, SEGMENT, MOST, TILE)
        begin = low + (item - first) * length
        end = tl.minimum(begin + length, context)
        inner = heads[:, None] * HEAD_DIM + dims[None, :]
        row64 = row.to(tl.int64)
        queries = tl.load(query + row64 * stride_query + inner, mask=real, other=0.0)
        result, lse = _attend_segment(
            queries,
            k_pool + kv_head * stride_head,
            v_pool + kv_head * stride_head,
            block_tables + row64 * stride_table,
            begin,
            end,
            stride_block,
            stride_token,
            scale,
            HEADS,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            TILE,
            SOFTCAP,
            PRECISION,
        )
        result *= value_scale
        if context - low <= length:
            tl.store(output + row64 * (NUM_HEADS * HEAD_DIM) + inner, result.to(output.dtype.element_ty), mask=real)
        else:
            item64 = first.to(tl.int64) + (item - first)
            tl.store(partial + item64 * (NUM_HEADS * HEAD_DIM) + inner, result, mask=real)
            tl.store(partial_lse + item64 * NUM_HEADS + heads, lse, mask=lanes < GROUP)


@triton.jit
def combine_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    context_lens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Grid (rows, query heads): adds up a row's segments, weighted by their sums of exponentials. Rows of one segment
    are done already; rows without tokens get zeros."""
    row, head = tl.program_id(0), tl.program_id(1)
    count = tl.sum(_count(context_lens, row + tl.arange(0, 1), row + 1, WINDOW, SEGMENT, MOST, TILE), 0)
    dims = tl.arange(0, DIM)
    if count != 1:
        first = _items_before(context_lens, row, WINDOW, SEGMENT, MOST, TILE, CHUNK).to(tl.int64)
        top, weight = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
        sums = tl.zeros([DIM], tl.float32)
        for start in range(0, count, COMBINE):
            segments = start + tl.arange(0, COMBINE)
            places = (first + segments) * NUM_HEADS + head
            lse = tl.load(partial_lse + places, mask=segments < count, other=float("-inf"))
            real = (segments < count)[:, None] & (dims < HEAD_DIM)[None, :]
            part = tl.load(partial + places[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
            new_top = tl.maximum(top, tl.max(lse, 0))
            shrink, powers = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            sums = sums * shrink + tl.sum(part * powers[:, None], 0)
            weight = weight * shrink + tl.sum(powers, 0)
            top = new_top
        sums = tl.where(weight > 0.0, sums / tl.where(weight > 0.0, weight, 1.0), 0.0)
        place = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(output + place + dims, sums.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_launches(
    output: torch.Tensor,
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: RaggedRows,
    scale: float,
    window: int | None,
    softcap: float | None,
    scales: KvScales | None,
    config: DecodeConfig,
) -> list[Launch]:
    """The one or two launches that fill `output` [R, H, D]; the second one only if some row needs it."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = k_pool.shape[2]
    group = num_heads // num_kv_heads
    counts = [num_segments(context, window, config) for context in rows.host_context_lens]
    items = max(1, sum(counts))
    shared = {
        "output": output,
        "partial": query.new_empty((items, num_heads, head_dim), dtype=torch.float32),
        "partial_lse": query.new_empty((items, num_heads), dtype=torch.float32),
        "context_lens": rows.context_lens,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DIM": max(16, next_power_of_2(head_dim)),
        "TILE": config.tile,
        "SEGMENT": config.segment,
        "MOST": MAX_SEGMENTS,
        "CHUNK": SCAN_CHUNK,
        "WINDOW": window or 0,
    }
    attend = {
        "query": query,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "block_tables": rows.block_tables,
        "num_rows": len(rows),
        "stride_query": query.stride(0),
        "stride_table": rows.block_tables.stride(0),
        "stride_block": k_pool.stride(0),
        "stride_token": k_pool.stride(1),
        "stride_head": k_pool.stride(2),
        "scale": scale,
        "GROUP": group,
        "HEADS": max(16, next_power_of_2(group)),
        "BLOCK_SIZE": k_pool.shape[1],
        "SOFTCAP": softcap or 0.0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        **scale_arguments(scales),
    }
    grid = (min(items, max(1, config.programs // num_kv_heads)), num_kv_heads)
    launches = [Launch(paged_decode_kernel, grid, shared | attend, config.num_warps, config.num_stages)]
    if any(count != 1 for count in counts):
        grid = (len(rows), num_heads)
        launches.append(Launch(combine_kernel, grid, shared | {"COMBINE": COMBINE_CHUNK}))
    return launches
