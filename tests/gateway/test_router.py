"""The choice of workers: a pure function of who is there and what is outstanding."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backend import UnavailableError
from gateway.router import InFlightBook, choose
from gateway.worker import Worker
from kvtransfer.worker_facts import Load
from tests.gateway.cluster_world import LIMITS, hello


def worker(worker_id: str, running: int = 0, waiting: int = 0, usage: float = 0.0, **limits: int) -> Worker:
    introduction = hello(worker_id, limits=msgspec.structs.replace(LIMITS, **limits))
    load = Load(num_running=running, num_waiting=waiting, kv_usage=usage)
    return Worker(hello=introduction, link=f"{introduction.worker_id}/g/n", heard_at=0.0, progress_at=0.0, load=load)


def booked(*entries: tuple[str, int]) -> InFlightBook:
    book = InFlightBook()
    for number, (worker_id, num_tokens) in enumerate(entries):
        book.add(worker_id, f"r{number}", num_tokens)
    return book


def pick(prefill, decode, book=None) -> tuple[str, str]:
    route = choose(prefill, decode, book or InFlightBook())
    return route.prefill.worker_id, route.decode.worker_id


ONE_P, ONE_D = [worker("prefill-0")], [worker("decode-0")]


@pytest.mark.parametrize(
    ("workers", "entries", "chosen"),
    [
        ([worker("prefill-1"), worker("prefill-0")], [], "prefill-0"),
        ([worker("prefill-0"), worker("prefill-1")], [("prefill-0", 5)], "prefill-1"),
        (
            [worker("prefill-0"), worker("prefill-1")],
            [("prefill-0", 5), ("prefill-1", 2), ("prefill-1", 4)],
            "prefill-0",
        ),
        ([worker("prefill-0", waiting=1), worker("prefill-1")], [], "prefill-1"),
    ],
)
def test_prefill_goes_where_the_fewest_prompt_tokens_are_outstanding(workers, entries, chosen):
    assert pick(workers, ONE_D, booked(*entries)) == (chosen, "decode-0")


@pytest.mark.parametrize(
    ("workers", "entries", "chosen"),
    [
        ([worker("decode-1"), worker("decode-0")], [], "decode-0"),
        ([worker("decode-0", usage=0.4), worker("decode-1", usage=0.3)], [], "decode-1"),
        ([worker("decode-0", running=4), worker("decode-1", running=3)], [], "decode-1"),
        ([worker("decode-0", waiting=4), worker("decode-1", running=3)], [], "decode-1"),
        ([worker("decode-0"), worker("decode-1")], [("decode-0", 100)], "decode-1"),
        ([worker("decode-0", usage=0.9), worker("decode-1", running=2)], [("decode-1", 100)], "decode-1"),
        ([worker("decode-0", running=1), worker("decode-1", running=2)], [("decode-0", 1)] * 3, "decode-1"),
    ],
)
def test_decode_goes_where_the_pressure_is_least(workers, entries, chosen):
    assert pick(ONE_P, workers, booked(*entries)) == ("prefill-0", chosen)


@pytest.mark.parametrize(("prefill", "decode", "missing"), [([], ONE_D, "prefill"), (ONE_P, [], "decode")])
def test_a_missing_role_is_named(prefill, decode, missing):
    with pytest.raises(UnavailableError, match=f"no {missing} worker can take requests"):
        choose(prefill, decode, InFlightBook())


TWO_P, TWO_D = [worker("prefill-0"), worker("prefill-1")], [worker("decode-0"), worker("decode-1")]


@pytest.mark.parametrize(
    ("suspects", "chosen", "avoids"),
    [
        ({"prefill-0"}, ("prefill-1", "decode-0"), True),
        ({"decode-0"}, ("prefill-0", "decode-1"), True),
        ({"decode-0", "decode-1"}, ("prefill-0", "decode-0"), False),
        ({"prefill-0", "prefill-1", "decode-0"}, ("prefill-0", "decode-1"), False),
    ],
)
def test_suspects_are_taken_only_where_there_is_nobody_else(suspects, chosen, avoids):
    refs = {(worker_id, "g1") for worker_id in suspects}
    route = choose(TWO_P, TWO_D, InFlightBook(), refs)
    assert (route.prefill.worker_id, route.decode.worker_id) == chosen
    assert route.avoids(refs) is avoids


def test_another_start_of_a_suspect_is_none():
    route = choose(TWO_P, TWO_D, InFlightBook(), {("prefill-0", "g0"), ("decode-0", "g0")})
    assert (route.prefill.worker_id, route.decode.worker_id) == ("prefill-0", "decode-0")


def test_prefill_alone_needs_no_decode_worker():
    route = choose(TWO_P, None, InFlightBook())
    assert (route.prefill.worker_id, route.decode) == ("prefill-0", None)
    assert not route.avoids({("prefill-0", "g1")})


@given(st.permutations([worker(f"decode-{i}", running=i % 2) for i in range(6)]))
def test_the_order_of_workers_does_not_matter(workers):
    assert pick(ONE_P, workers) == ("prefill-0", "decode-0")


def test_a_burst_between_two_heartbeats_is_spread():
    book, decode = InFlightBook(), [worker("decode-0"), worker("decode-1"), worker("decode-2")]
    for number in range(9):
        book.add(pick(ONE_P, decode, book)[1], f"r{number}", 50)
    assert [book.num_requests(f"decode-{i}") for i in range(3)] == [3, 3, 3]


def test_the_book_forgets_what_is_discarded():
    book = booked(("a", 5), ("a", 7), ("b", 1))
    assert (book.num_tokens("a"), book.num_requests("a")) == (12, 2)
    book.discard("a", "r0")
    book.discard("a", "r0")
    book.discard("nobody", "r0")
    assert book.entries == {("a", "r1"), ("b", "r2")}
    book.discard("a", "r1")
    book.discard("b", "r2")
    assert book.entries == frozenset()


# --- who holds the prompt's beginning ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "held", "chosen"),
    [
        ((0.0, 0.0), (0, 0), "decode-0"),
        ((0.0, 0.0), (16, 32), "decode-1"),
        ((0.0, 0.0), (32, 32), "decode-0"),
        ((0.3, 0.35), (0, 16), "decode-1"),
        ((0.3, 0.45), (0, 1600), "decode-0"),
        ((0.35, 0.3), (0, 0), "decode-1"),
    ],
)
def test_of_workers_about_as_good_the_one_that_holds_most_of_the_prompt_is_taken(usage, held, chosen):
    decode = [worker(f"decode-{index}", usage=usage[index]) for index in range(2)]
    counts = {"prefill-0": 0, **{f"decode-{index}": held[index] for index in range(2)}}
    route = choose(ONE_P, decode, InFlightBook(), num_held=lambda one: counts[one.worker_id])
    assert route.decode.worker_id == chosen


@pytest.mark.parametrize(
    ("about", "outstanding", "held", "chosen"),
    [
        ({}, (0, 0), (0, 0), "prefill-0"),
        ({}, (0, 0), (16, 32), "prefill-1"),
        ({}, (0, 0), (32, 32), "prefill-0"),
        ({}, (0, 31), (0, 32), "prefill-1"),
        ({}, (0, 33), (0, 32), "prefill-0"),
        ({}, (40, 60), (16, 32), "prefill-0"),
        ({}, (40, 55), (16, 32), "prefill-1"),
        ({"usage": 0.05}, (0, 0), (0, 32), "prefill-1"),
        ({"usage": 0.2}, (0, 0), (0, 1600), "prefill-0"),
        ({"running": 20}, (0, 0), (0, 1600), "prefill-0"),
        ({"usage": 0.2}, (5, 0), (0, 0), "prefill-1"),
        ({"usage": 0.2}, (5, 0), (0, 16), "prefill-1"),
    ],
)
def test_prefill_goes_where_the_prompt_is_done_first(about, outstanding, held, chosen):
    """What is held saves so many tokens, but not at a worker that is clearly busier."""
    prefill = [worker("prefill-0", max_num_seqs=100), worker("prefill-1", max_num_seqs=100, **about)]
    book = booked(*((f"prefill-{index}", count) for index, count in enumerate(outstanding) if count))
    counts = {f"prefill-{index}": held[index] for index in range(2)}
    route = choose(prefill, None, book, num_held=lambda one: counts[one.worker_id])
    assert route.prefill.worker_id == chosen


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), min_size=1, max_size=5),
    st.data(),
)
def test_without_anything_held_prefill_is_chosen_by_what_is_outstanding(workers, data):
    prefill = [worker(f"prefill-{index}", running=running) for index, (_, running) in enumerate(workers)]
    book = booked(*((f"prefill-{index}", tokens) for index, (tokens, _) in enumerate(workers)))
    route = choose(data.draw(st.permutations(prefill)), None, book)
    least = min((tokens, running, index) for index, (tokens, running) in enumerate(workers))
    assert route.prefill.worker_id == f"prefill-{least[2]}"


def test_a_suspect_is_not_taken_for_what_it_holds():
    route = choose(None, TWO_D, InFlightBook(), {("decode-0", "g1")}, lambda one: 100 * (one.worker_id == "decode-0"))
    assert route.decode.worker_id == "decode-1"


def test_decode_alone_needs_no_prefill_worker():
    route = choose(None, TWO_D, InFlightBook())
    assert (route.prefill, route.decode.worker_id) == (None, "decode-0")
    assert route.workers == (TWO_D[0],)
    assert route.num_suspects({("decode-0", "g1"), ("prefill-0", "g1")}) == 1
