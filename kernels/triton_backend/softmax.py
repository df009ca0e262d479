"""What both attentions do with a tile of scores: scale, soft cap, and the running softmax over tiles.

The running softmax keeps, for each row of a tile, the largest score so far and the sum of exponentials relative to it
(Milakov & Gimelshein 2018, arXiv:1805.02867), in base 2 because that is what the hardware computes.
"""

from typing import Final

import triton
import triton.language as tl

LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_base2(products: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores times log2(e), float32. With a cap c > 0 a score s becomes c * tanh(s / c) (Gemma 2, arXiv:2408.00118).

    tanh as 1 - 2 / (exp(2 x) + 1) is right at both ends: exp overflows to inf, or underflows to 0.
    """
    if SOFTCAP > 0.0:
        doubled = products * (scale * (2.0 / SOFTCAP))
        scores = SOFTCAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(doubled * LOG2_E) + 1.0))
    else:
        scores = products * (scale * LOG2_E)
    return scores


@triton.jit
def fold_tile(
    scores: tl.tensor, values: tl.tensor, sums: tl.tensor, top: tl.tensor, weight: tl.tensor, PRECISION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds a tile of scores [M, N] (masked: -inf) and values [N, D] to sums [M, D], largest scores and weights [M].

    A row that has seen no token yet keeps top = -inf; its differences are taken from 0, so that no inf - inf arises.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    powers = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    sums = sums * shrink[:, None]
    sums = tl.dot(powers.to(values.dtype), values, sums, input_precision=PRECISION)
    return sums, new_top, weight * shrink + tl.sum(powers, 1)


@triton.jit
def tile_offsets(
    positions: tl.tensor,
    inside: tl.tensor,
    table: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Where the tokens at `positions` of a row lie in a pool, in elements, int64: a block's offset may pass 2**31.

    `table`: the row's entries. Positions that are not `inside` read no entry, since what lies there is arbitrary.
    """
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return blocks * stride_block + (positions % BLOCK_SIZE) * stride_token
