"""K and V of many tokens between the pool and contiguous buffers, one launch each way.

A token's heads lie side by side in the pool, so what moves is a row of heads * head_dim elements:

    pool     slot s: | head 0 | head 1 | head 2 | head 3 |
    buffer   token t:         | head 1 | head 2 |              head_start 1, 2 heads
"""

import torch
import triton
import triton.language as tl

from kernels.triton_backend.formats import as_bytes
from kernels.triton_backend.launch import Launch, next_power_of_2

ELEMENTS = 4096
"""Elements that one program moves, of K and V each."""


@triton.jit(do_not_specialize=["num_tokens"])
def move_kv_kernel(
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    num_tokens: tl.tensor,
    stride_slot: tl.tensor,
    stride_key: tl.tensor,
    stride_value: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INTO_POOL: tl.constexpr,
) -> None:
    """Grid (token tiles, column tiles). `offset`: of the first head in a slot, in elements; SIZE: heads * head_dim."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = (tokens < num_tokens)[:, None] & (columns < SIZE)[None, :]
    starts = tl.load(slots + tokens, mask=tokens < num_tokens, other=0) * stride_slot + offset
    in_pool = starts[:, None] + columns[None, :]
    in_key = tokens[:, None] * stride_key + columns[None, :]
    in_value = tokens[:, None] * stride_value + columns[None, :]
    if INTO_POOL:
        tl.store(k_pool + in_pool, tl.load(key + in_key, mask=real), mask=real)
        tl.store(v_pool + in_pool, tl.load(value + in_value, mask=real), mask=real)
    else:
        tl.store(key + in_key, tl.load(k_pool + in_pool, mask=real), mask=real)
        tl.store(value + in_value, tl.load(v_pool + in_pool, mask=real), mask=real)


def move_kv_launch(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_start: int,
    *,
    into_pool: bool,
) -> Launch:
    """The launch that moves the tokens at `slots` [n] into `key` and `value` [n, heads, D], or from there."""
    num_tokens, num_heads, head_dim = key.shape
    size = num_heads * head_dim
    columns = min(1024, next_power_of_2(size))
    arguments = {
        "k_pool": as_bytes(k_pool),
        "v_pool": as_bytes(v_pool),
        "key": as_bytes(key),
        "value": as_bytes(value),
        "slots": slots,
        "num_tokens": num_tokens,
        "stride_slot": k_pool.stride(1),
        "stride_key": key.stride(0),
        "stride_value": value.stride(0),
        "offset": head_start * head_dim,
        "SIZE": size,
        "COLUMNS": columns,
        "TOKENS": ELEMENTS // columns,
        "INTO_POOL": into_pool,
    }
    grid = (-(-num_tokens * columns // ELEMENTS), -(-size // columns))
    return Launch(move_kv_kernel, grid, arguments)
