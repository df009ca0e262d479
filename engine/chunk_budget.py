"""How a step's budget of prompt tokens is shared by prompts that wait for it in an order. Knows no torch and no clock.

With two in part at most, and a budget of 8:

    missing  | 20 | 3 | 9 | 5 |          the first takes half of the budget; the second less than half of what is left,
    count    |  4 | 3 | 1 | 0 |          and is done; the third takes the rest, and is the second that is cut
"""

from collections.abc import Sequence


def share_in_order(missing: Sequence[int], budget: int, max_partial: int) -> list[int]:
    """Tokens for each of the prompts that lack `missing` tokens, first come first: `budget` in all at most, and at most
    `max_partial` prompts that get some and not all. The first gets budget / max_partial at least, or all it lacks."""
    assert max_partial > 0, max_partial
    counts, left, slots = [0] * len(missing), budget, max_partial
    for index, wanted in enumerate(missing):
        if left == 0:
            break
        counts[index] = min(wanted, -(-left // slots))
        left -= counts[index]
        slots -= counts[index] < wanted
    for index, wanted in enumerate(missing):  # what those behind did not need
        more = min(wanted - counts[index], left)
        counts[index] += more
        left -= more
    return counts
