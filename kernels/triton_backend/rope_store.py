"""Rotation of q and k and the write of k and v into the pool, in its format, in one launch."""

import torch
import triton
import triton.language as tl

from kernels.face import KvScales
from kernels.triton_backend.formats import as_bytes, packed, scale_arguments
from kernels.triton_backend.launch import Launch, next_power_of_2

HEADS = 16
"""Heads that one program takes; the last one of a token takes the rest."""


@triton.jit
def _rotated(
    x: tl.tensor, inner: tl.tensor, real: tl.tensor, cos: tl.tensor, sin: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves, rotated, float32; element i of a head is paired with element i + HALF."""
    front = tl.load(x + inner, mask=real, other=0.0).to(tl.float32)
    back = tl.load(x + inner + HALF, mask=real, other=0.0).to(tl.float32)
    return front * cos - back * sin, back * cos + front * sin


@triton.jit
def _store_heads(
    places: tl.tensor,
    numbers: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    is_head: tl.tensor,
    real: tl.tensor,
    LIMIT: tl.constexpr,
) -> None:
    """Writes numbers [heads, columns] in the pool's format; each head divided by its scale, if there are scales."""
    if scale is not None:
        divisors = tl.broadcast_to(tl.load(scale + heads, mask=is_head, other=1.0)[:, None], numbers.shape)
        numbers = tl.div_rn(numbers.to(tl.float32), divisors)
    tl.store(places, packed(numbers, places.dtype.element_ty, LIMIT), mask=real)


@triton.jit
def rope_store_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    slot_mapping: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride_query: tl.tensor,
    stride_key: tl.tensor,
    stride_value: tl.tensor,
    stride_slot: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Grid (tokens, head tiles of the query, then those of key and value). Heads of a token lie side by side."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    columns = tl.arange(0, COLUMNS)
    in_half = (columns < HALF)[None, :]
    cosine = tl.load(cos + token * HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    sine = tl.load(sin + token * HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    if tile < query_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        inner = heads[:, None] * (2 * HALF) + columns[None, :]
        real = (heads < NUM_HEADS)[:, None] & in_half
        front, back = _rotated(query + token * stride_query, inner, real, cosine, sine, HALF)
        target = output + token * (NUM_HEADS * 2 * HALF)
        tl.store(target + inner, front.to(output.dtype.element_ty), mask=real)
        tl.store(target + inner + HALF, back.to(output.dtype.element_ty), mask=real)
    else:
        heads = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)
        inner = heads[:, None] * (2 * HALF) + columns[None, :]
        is_head = heads < NUM_KV_HEADS
        real = is_head[:, None] & in_half
        place = tl.load(slot_mapping + token) * stride_slot + inner
        front, back = _rotated(key + token * stride_key, inner, real, cosine, sine, HALF)
        _store_heads(k_pool + place, front.to(key.dtype.element_ty), k_scale, heads, is_head, real, LIMIT)
        _store_heads(k_pool + place + HALF, back.to(key.dtype.element_ty), k_scale, heads, is_head, real, LIMIT)
        source = value + token * stride_value + inner
        _store_heads(v_pool + place, tl.load(source, mask=real), v_scale, heads, is_head, real, LIMIT)
        _store_heads(v_pool + place + HALF, tl.load(source + HALF, mask=real), v_scale, heads, is_head, real, LIMIT)


def rope_store_launch(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KvScales | None,
) -> Launch:
    """The launch that fills `output` [T, H, D] and the pool's slots."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    columns = next_power_of_2(head_dim // 2)
    arguments = {
        "output": output,
        "query": query,
        "key": key,
        "value": value,
        "cos": cos,
        "sin": sin,
        "k_pool": as_bytes(k_pool),
        "v_pool": as_bytes(v_pool),
        "slot_mapping": slot_mapping,
        "stride_query": query.stride(0),
        "stride_key": key.stride(0),
        "stride_value": value.stride(0),
        "stride_slot": k_pool.stride(1),
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "COLUMNS": columns,
        "HEADS": HEADS,
        "LIMIT": torch.finfo(k_pool.dtype).max,
        **scale_arguments(scales),
    }
    tiles = -(-num_heads // HEADS) + -(-num_kv_heads // HEADS)
    # 8 elements a thread: 128 bits in half precision.
    num_warps = max(1, HEADS * columns // (8 * 32))
    return Launch(rope_store_kernel, (num_tokens, tiles), arguments, num_warps)
