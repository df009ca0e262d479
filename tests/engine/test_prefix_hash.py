"""Names of block contents: equal prefixes share them, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefix_hash import BlockNames, root_name

EXTRAS = st.dictionaries(
    st.sampled_from(["cache_salt", "lora", "a", "ab", ""]) | st.text(max_size=4), st.text(max_size=6)
)


class Tokens:
    def __init__(self, token_ids) -> None:
        self.token_ids = list(token_ids)

    def token_slice(self, start, stop):
        return self.token_ids[start:stop]


def names(token_ids, extras=None, block_size=4):
    tokens = Tokens(token_ids)
    return list(BlockNames(extras or {}, block_size).of(tokens, len(tokens.token_ids) // block_size))


def test_only_full_blocks_have_names_and_equal_prefixes_share_them():
    assert names(range(3)) == []
    long, short = names(range(11)), names([*range(8), 99])
    assert len(long) == len(short) == 2
    assert long == short
    assert names([*range(7), 99])[0] == long[0]
    assert names([*range(7), 99])[1] != long[1]


def test_a_name_depends_on_all_tokens_before_it():
    assert names([1, 2, 3, 4, 5, 6, 7, 8])[1] != names([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert names([5, 6, 7, 8])[0] != names([1, 2, 3, 4, 5, 6, 7, 8])[1]


def test_names_grow_with_the_sequence():
    growing = BlockNames({}, 4)
    for length in range(1, 20):
        assert list(growing.of(Tokens(range(length)), length // 4)) == names(range(length))


def test_a_block_that_is_not_full_has_no_name():
    with pytest.raises(AssertionError, match="3 tokens of 4"):
        BlockNames({}, 4).of(Tokens(range(7)), 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"cache_salt": ""}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {"lora": "a"}),
        ({"cache_salt": "ab"}, {"cache_salt": "a", "b": ""}),
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "d", "c": "b"}),
    ],
)
def test_extras_cannot_collide(one, other):
    assert root_name(one) != root_name(other)
    assert names(range(4), one) != names(range(4), other)


def test_the_order_of_extras_does_not_count():
    assert root_name({"a": "1", "b": "2"}) == root_name({"b": "2", "a": "1"})


def test_block_sizes_give_other_names():
    assert set(names(range(16), block_size=4)).isdisjoint(names(range(16), block_size=8))


@given(EXTRAS, EXTRAS)
def test_other_extras_give_other_names_whatever_they_hold(one, other):
    """An adapter's id, say, can be one more field: no text in one field passes for another field."""
    assert (root_name(one) == root_name(other)) == (one == other)


@given(st.dictionaries(st.sampled_from("abc"), st.text(max_size=6)), st.text(max_size=6))
def test_one_field_more_gives_other_names(extras, value):
    assert root_name({**extras, "one more": value}) != root_name(extras)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=8),
    st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=8),
)
def test_other_tokens_give_other_names(one, other):
    ours, theirs = names(one), names(other)
    assert (ours[0] == theirs[0]) == (one[:4] == other[:4])
    assert (ours[1] == theirs[1]) == (one == other)


def test_a_salt_cannot_pass_for_the_tokens_of_a_parent():
    first, _ = names(range(8))
    for salt in (first.hex(), first.decode("latin-1"), "".join(map(chr, range(4)))):
        assert names(range(4, 8), {"cache_salt": salt})[0] != names(range(8))[1]
        assert root_name({"cache_salt": salt}) != first


def test_a_name_has_128_bits():
    assert {len(name) for name in [root_name({}), *names(range(8))]} == {16}
