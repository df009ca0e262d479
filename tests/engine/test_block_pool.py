"""The allocator of blocks: all or nothing, first freed first reused, and books that prove themselves."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool, blocks_for
from engine.errors import OutOfBlocksError


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "blocks"),
    [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7), (1 << 40, 16, 1 << 36)],
)
def test_blocks_for(num_tokens, block_size, blocks):
    assert blocks_for(num_tokens, block_size) == blocks


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, 8)
    assert pool.can_fit(32)
    assert not pool.can_fit(33)
    held = pool.allocate(9, "a")
    assert held == [0, 1]
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 of 4 free"):
        pool.allocate(17, "b")
    assert (pool.num_free, pool.usage) == (2, 0.5)
    pool.check_integrity([("a", held)])
    pool.free(held, "a")
    assert (pool.num_free, pool.usage) == (4, 0.0)
    pool.check_integrity([])


def test_the_block_that_has_been_free_for_longest_comes_first():
    pool = BlockPool(4, 1)
    first = pool.allocate(2, "a")
    pool.free(first, "a")
    assert pool.allocate(4, "b") == [2, 3, 0, 1]


@pytest.mark.parametrize(("block_ids", "owner"), [([0], "b"), ([2], "a"), ([0, 0], "a"), ([99], "a")])
def test_freeing_what_is_not_held_is_our_own_bug(block_ids, owner):
    pool = BlockPool(4, 1)
    pool.allocate(2, "a")
    with pytest.raises(AssertionError, match=f"freed by '{owner}'"):
        pool.free(block_ids, owner)


@pytest.mark.parametrize(
    "held",
    [
        [],
        [("a", [0])],
        [("b", [0, 1])],
        [("a", [0, 1]), ("b", [2])],
        [("a", [0, 2])],
    ],
    ids=["leak", "part", "wrong owner", "too much", "wrong block"],
)
def test_wrong_books_are_found(held):
    pool = BlockPool(4, 1)
    pool.allocate(2, "a")
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


def test_a_broken_free_queue_is_found():
    pool = BlockPool(4, 1)
    held = pool.allocate(2, "a")
    pool._free.append(3)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity([("a", held)])
    pool._free.pop()
    pool._free.append(0)
    with pytest.raises(AssertionError, match="both free and owned"):
        pool.check_integrity([("a", held)])
    pool._free.pop()
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check_integrity([("a", held)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_order_of_allocations_and_frees_keeps_the_books(data):
    pool, held = BlockPool(6, 3), {}
    for turn in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            owner = data.draw(st.sampled_from(sorted(held)))
            pool.free(held.pop(owner), owner)
        else:
            num_tokens = data.draw(st.integers(0, 20))
            fits = pool.can_fit(num_tokens)
            try:
                held[turn] = pool.allocate(num_tokens, turn)
                assert fits
            except OutOfBlocksError:
                assert not fits
        pool.check_integrity(held.items())
        assert pool.num_free == 6 - sum(map(len, held.values()))
