"""Masks over the vocabulary, one bit a token: packed on the host, applied to logits.

Bit i of word w stands for token 32 * w + i. A row has ceil(V / 32) words; what its last word says beyond V is nothing.

To a GPU goes the mask as it is, and is unpacked there. On a CPU unpacking takes longer than all else that happens to
the logits, so there the mask is made into addends beside the step, and a row costs one addition.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

WORD_BITS: Final = 32
Words = npt.NDArray[np.int32]
_ADDENDS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""Of each byte of a mask, what its eight tokens get."""


def num_words(vocab_size: int) -> int:
    """Words of one row."""
    return -(-vocab_size // WORD_BITS)


def words_of(token_ids: Sequence[int], vocab_size: int) -> Words:
    """The row [W] int32 that allows `token_ids` and nothing else."""
    allowed = np.zeros(num_words(vocab_size) * WORD_BITS, dtype=np.uint8)
    allowed[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)


def forbid(words: Words, token_id: int) -> None:
    """Clears the bit of one token in a row [W]."""
    words.view(np.uint8)[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF


def addends_of(words: Words, vocab_size: int) -> torch.Tensor:
    """Masks [R, W] as [R, V] float32 on the CPU: 0 where a token is allowed, -inf where not."""
    num_rows, width = words.shape
    return torch.from_numpy(_ADDENDS[words.view(np.uint8)].reshape(num_rows, width * WORD_BITS)[:, :vocab_size])


def add_mask(logits: torch.Tensor, rows: Sequence[int], addends: torch.Tensor) -> None:
    """`mask_logits` with a mask of `addends_of`. A forbidden logit that is infinite becomes NaN, which counts as -inf
    too."""
    if len(rows) == len(logits):
        logits += addends
        return
    for row, addend in zip(rows, addends, strict=True):
        logits[row] += addend


def mask_logits(logits: torch.Tensor, rows: Sequence[int], bitmask: torch.Tensor) -> None:
    """Sets logits of tokens that are not allowed to -inf, in place. `bitmask` [len(rows), W] int32, on any device, is
    for the rows `rows` of `logits` [R, V]; the others stay as they are."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    bits = (bitmask.to(logits.device).unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[-1]] == 0
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
        return
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    logits[index] = logits[index].masked_fill(forbidden, float("-inf"))
