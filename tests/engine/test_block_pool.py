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
    assert pool.allocate(4, "b") == [2, 3, 1, 0], "of what is freed at once, the tail comes first"


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


def test_broken_queues_are_found():
    pool = BlockPool(4, 1)
    held = pool.allocate(2, "a")
    pool._unnamed[0] = None
    with pytest.raises(AssertionError, match="two places"):
        pool.check_integrity([("a", held)])
    del pool._unnamed[0], pool._unnamed[3]
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity([("a", held)])
    pool._named[3] = None
    with pytest.raises(AssertionError, match="without a name"):
        pool.check_integrity([("a", held)])


# --- sharing


def filled(pool, names, owner="a"):
    """Blocks that hold what `names` say."""
    block_ids = pool.allocate(len(names) * pool.block_size, owner)
    for block_id, name in zip(block_ids, names, strict=True):
        pool.name(block_id, name)
    return block_ids


def test_contents_outlive_their_owner_and_are_shared():
    pool = BlockPool(6, 4)
    held = filled(pool, [b"x", b"y"])
    assert pool.find([b"x", b"y", b"z"]) == held
    pool.share(held, "b")
    pool.check_integrity([("a", held), ("b", held)])
    assert (pool.num_free, pool.num_used) == (4, 2)
    pool.free(held, "a")
    pool.free(held, "b")
    assert pool.num_free == 6
    assert pool.find([b"x", b"y"]) == held
    pool.share(held[:1], "c")
    assert pool.num_free == 5
    pool.check_integrity([("c", held[:1])])


def test_only_an_unbroken_prefix_is_found():
    pool = BlockPool(6, 4)
    held = filled(pool, [b"x", b"y"])
    assert pool.find([b"y"]) == held[1:]
    assert pool.find([b"z", b"x"]) == []
    assert pool.find([b"x", b"z", b"y"]) == held[:1]


def test_eviction_takes_unnamed_blocks_first_then_the_least_recently_used_tail_first():
    pool = BlockPool(5, 1)
    old, new = filled(pool, [b"o1", b"o2"], "old"), filled(pool, [b"n1", b"n2"], "new")
    pool.free(old, "old")
    pool.free(new, "new")
    assert pool.allocate(1, "b") == [4]
    assert pool.allocate(1, "b") == [old[1]]
    assert pool.find([b"o1", b"o2"]) == old[:1]
    pool.share(old[:1], "c")
    pool.free(old[:1], "c")
    assert pool.allocate(2, "b") == [new[1], new[0]], "what was used again is no longer the oldest"
    assert pool.counts.num_evicted == 3
    pool.check_integrity([("b", [4, old[1], new[1], new[0]])])


def test_room_counts_shared_blocks_that_nobody_owns_as_taken():
    pool = BlockPool(3, 4)
    held = filled(pool, [b"x"])
    assert pool.can_fit(12, shared=held)
    pool.free(held, "a")
    assert pool.can_fit(12, shared=held)
    assert not pool.can_fit(13, shared=held)
    pool.allocate(4, "b")
    assert not pool.can_fit(12, shared=held)
    assert pool.can_fit(8, shared=held)


def test_a_second_block_with_the_same_contents_is_kept_unnamed():
    pool = BlockPool(4, 4)
    first, second = filled(pool, [b"x"], "a"), filled(pool, [b"x"], "b")
    assert pool.find([b"x"]) == first
    pool.free(second, "b")
    pool.free(first, "a")
    assert pool.find([b"x"]) == first
    pool.check_integrity([])


def test_forgetting_the_names_shares_nothing_any_more():
    pool = BlockPool(4, 4)
    kept, freed = filled(pool, [b"x"], "a"), filled(pool, [b"y"], "b")
    pool.free(freed, "b")
    pool.forget_names()
    assert pool.find([b"x"]) == pool.find([b"y"]) == []
    pool.check_integrity([("a", kept)])
    pool.free(kept, "a")
    assert pool.num_free == 4
    pool.check_integrity([])


def test_sharing_what_has_no_contents_is_our_own_bug():
    pool = BlockPool(4, 4)
    with pytest.raises(AssertionError, match="no contents"):
        pool.share([0], "a")
    with pytest.raises(AssertionError, match="nobody who owns it"):
        pool.name(0, b"x")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_order_of_allocations_shares_and_frees_keeps_the_books(data):
    """Contents are letters; a block that is found must hold what its name says."""
    pool, held, contents = BlockPool(6, 3), {}, {}
    for turn in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["free", "prompt", "prompt", "forget"]))
        if action == "free" and held:
            owner = data.draw(st.sampled_from(sorted(held)))
            pool.free(held.pop(owner), owner)
        elif action == "forget":
            pool.forget_names()
        else:
            names = [name.encode() for name in data.draw(st.sampled_from(["", "a", "ab", "abc", "ax", "xy"]))]
            found = pool.find(names)
            assert [contents[block_id] for block_id in found] == names[: len(found)]
            num_tokens = 3 * len(names) + data.draw(st.integers(0, 4))
            if not pool.can_fit(num_tokens, shared=found):
                continue
            pool.share(found, turn)
            fresh = pool.allocate(num_tokens - 3 * len(found), turn)
            held[turn] = [*found, *fresh]
            contents.update(dict.fromkeys(fresh))
            for block_id, name in zip(fresh, names[len(found) :], strict=False):
                contents[block_id] = name
                pool.name(block_id, name)
        pool.check_integrity(held.items())
        assert pool.num_free == 6 - len({block_id for block_ids in held.values() for block_id in block_ids})
