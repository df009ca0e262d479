"""A step's prompt tokens, shared in order."""

from hypothesis import given
from hypothesis import strategies as st

from engine.chunk_budget import share_in_order

PROMPTS = st.lists(st.integers(1, 40), max_size=8)


def one_after_another(missing, budget):
    """What a single prompt in part means, said simply."""
    counts = []
    for wanted in missing:
        counts.append(min(wanted, budget))
        budget -= counts[-1]
    return counts


def test_the_drawn_example():
    assert share_in_order([20, 3, 9, 5], 8, 2) == [4, 3, 1, 0]


def test_what_those_behind_do_not_need_goes_to_the_first():
    assert share_in_order([20, 2], 8, 4) == [6, 2]
    assert share_in_order([20], 8, 4) == [8]


@given(PROMPTS, st.integers(1, 30))
def test_one_in_part_is_one_after_another(missing, budget):
    assert share_in_order(missing, budget, 1) == one_after_another(missing, budget)


@given(PROMPTS, st.integers(1, 30), st.integers(1, 5))
def test_the_budget_is_used_and_kept_and_the_first_has_its_share(missing, budget, max_partial):
    counts = share_in_order(missing, budget, max_partial)
    assert all(0 <= count <= wanted for count, wanted in zip(counts, missing, strict=True))
    assert sum(counts) == min(budget, sum(missing))
    assert sum(1 for count, wanted in zip(counts, missing, strict=True) if 0 < count < wanted) <= max_partial
    if missing:
        assert counts[0] >= min(missing[0], budget / max_partial)
