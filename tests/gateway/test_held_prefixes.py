"""What the gateway remembers of decode workers' caches: names, shelves, bounds."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.held_prefixes import MAX_BLOCKS, BlockChain, HeldPrefixes, Shelf
from gateway.worker import Worker
from tests.gateway.cluster_world import LAYOUT, LIMITS, hello


def worker(worker_id="decode-0", block_size=4, kv_tokens=2000, **changes) -> Worker:
    layout, limits = replace(LAYOUT, block_size=block_size), replace(LIMITS, kv_tokens=kv_tokens)
    introduction = hello(worker_id, layout=layout, limits=limits, **changes)
    return Worker(hello=introduction, link=f"{worker_id}/g1/n", heard_at=0.0, progress_at=0.0)


def holding(*prompts, **about) -> tuple[HeldPrefixes, Worker]:
    held, decode = HeldPrefixes(), worker(**about)
    held.meet(decode)
    for prompt in prompts:
        held.note(decode.ref, BlockChain(), prompt)
    return held, decode


def test_names_depend_on_all_that_is_before():
    one, other = BlockChain(), BlockChain()
    first = one.of(2, [1, 2, 3, 4, 5])
    assert len(first) == 2, "full blocks only"
    assert other.of(2, [1, 2, 3, 9])[0] == first[0]
    assert other.of(2, [1, 2, 3, 9])[1] != first[1]
    assert BlockChain().of(2, [0, 2, 3, 4])[1] != first[1]
    assert BlockChain("salt").of(2, [1, 2])[0] != first[0]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5), st.data())
def test_a_chain_that_grows_has_the_names_of_one_made_at_once(tokens, block_size, data):
    chain = BlockChain()
    for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))):
        chain.of(block_size, tokens[:stop])
    assert chain.of(block_size, tokens) == BlockChain().of(block_size, tokens)
    assert chain.of(block_size, tokens[:3]) == BlockChain().of(block_size, tokens[:3])


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=6),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_what_is_held_is_the_longest_common_beginning(prompts, asked, block_size):
    """The slow twin: compare with each prompt token by token."""
    held, decode = holding(*prompts, block_size=block_size)
    found = held.num_held(decode.ref, BlockChain(), asked)

    def shared(prompt) -> int:
        count = 0
        limit = min(len(prompt) // block_size * block_size, len(asked) - 1)
        while count < limit and prompt[count] == asked[count]:
            count += 1
        return count // block_size * block_size

    assert found == max(map(shared, prompts), default=0)


def test_the_last_token_is_never_held():
    held, decode = holding([1, 2, 3, 4, 5, 6, 7, 8])
    assert held.num_held(decode.ref, BlockChain(), [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert held.num_held(decode.ref, BlockChain(), [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_other_salts_workers_and_starts_hold_nothing():
    held, decode = holding([1, 2, 3, 4, 5])
    assert held.num_held(decode.ref, BlockChain("tenant"), [1, 2, 3, 4, 5]) == 0
    assert held.num_held(("decode-0", "g2"), BlockChain(), [1, 2, 3, 4, 5]) == 0
    assert held.num_held(("decode-1", "g1"), BlockChain(), [1, 2, 3, 4, 5]) == 0


def test_a_shelf_forgets_what_was_used_longest_ago_and_ends_before_beginnings():
    shelf = Shelf(block_size=4, max_blocks=4)
    shelf.put([1, 2, 3])
    shelf.put([7])
    assert (shelf.num_held([1, 2, 3]), shelf.num_held([7])) == (3, 1)
    shelf.put([8])
    assert (shelf.num_held([1, 2, 3]), len(shelf)) == (2, 4)
    shelf.put([1, 2])
    shelf.put([9])
    assert [shelf.num_held(names) for names in ([1, 2], [7], [8], [9])] == [2, 0, 1, 1]


def test_a_shelf_is_no_larger_than_the_workers_pool_or_our_bound():
    held, decode = holding(range(1000), kv_tokens=80)
    assert held.num_held(decode.ref, BlockChain(), range(1001)) == 80
    prompt = range(MAX_BLOCKS + 100)
    held, decode = holding(prompt, block_size=1, kv_tokens=2 * MAX_BLOCKS)
    assert held.num_held(decode.ref, BlockChain(), prompt) == MAX_BLOCKS


def test_what_a_worker_does_not_have_is_taken_off():
    held, decode = holding(range(20))
    held.correct(decode.ref, BlockChain(), range(20), 8)
    assert held.num_held(decode.ref, BlockChain(), range(21)) == 8
    held.correct(decode.ref, BlockChain(), range(20), 0)
    assert held.num_held(decode.ref, BlockChain(), range(21)) == 0


def test_nothing_is_remembered_of_who_was_not_met_or_has_gone():
    held, decode = holding()
    held.forget(decode.ref)
    held.forget(decode.ref)
    held.note(decode.ref, BlockChain(), range(20))
    held.correct(decode.ref, BlockChain(), range(20), 0)
    assert (len(held), held.num_held(decode.ref, BlockChain(), range(20))) == (0, 0)
    held.meet(worker(shares_prefixes=False))
    assert len(held) == 0


def test_meeting_again_changes_nothing_and_all_can_be_forgotten():
    held, decode = holding(range(20))
    held.meet(decode)
    assert held.num_held(decode.ref, BlockChain(), range(20)) == 16
    held.forget_all()
    assert held.num_held(decode.ref, BlockChain(), range(20)) == 0
