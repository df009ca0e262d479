"""Masks on logits against a slow twin in plain Python."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.bitmask import add_mask, addends_of, forbid, mask_logits, num_words, words_of


def is_allowed(words, token_id) -> bool:
    """The slow twin: one bit."""
    return (int(words[token_id // 32]) & 0xFFFFFFFF) >> (token_id % 32) & 1 == 1


def masked(logits, rows, words) -> list[list[float]]:
    """The slow twin: one logit after the other."""
    found = [list(row) for row in logits.tolist()]
    for place, row in enumerate(rows):
        for token_id in range(logits.shape[1]):
            if not is_allowed(words[place], token_id):
                found[row][token_id] = -math.inf
    return found


@settings(max_examples=60, deadline=None)
@given(vocab_size=st.integers(1, 131), num_rows=st.integers(1, 5), seed=st.integers(0, 999), data=st.data())
def test_both_ways_are_the_slow_one(vocab_size, num_rows, seed, data):
    dice = np.random.default_rng(seed)
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True).map(sorted))
    words = dice.integers(-(1 << 31), (1 << 31) - 1, (len(rows), num_words(vocab_size)), dtype=np.int32)
    logits = torch.from_numpy(dice.normal(size=(num_rows, vocab_size)).astype(np.float32))
    wanted = masked(logits, rows, words)
    by_bits, by_addends = logits.clone(), logits.clone()
    mask_logits(by_bits, rows, torch.from_numpy(words))
    add_mask(by_addends, rows, addends_of(words, vocab_size))
    assert by_bits.tolist() == wanted
    assert by_addends.tolist() == wanted


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 320])
def test_words_of_ids_are_these_ids(vocab_size):
    for token_ids in ([0], [vocab_size - 1], list(range(0, vocab_size, 3)), list(range(vocab_size))):
        words = words_of(token_ids, vocab_size)
        assert words.shape == (num_words(vocab_size),)
        assert [i for i in range(32 * len(words)) if is_allowed(words, i)] == token_ids
        forbid(words, token_ids[-1])
        assert [i for i in range(32 * len(words)) if is_allowed(words, i)] == token_ids[:-1]
