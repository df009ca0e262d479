"""The choice of workers: a pure function of who is there and what is outstanding."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.router import InFlightBook, Rejection, Route, choose
from gateway.worker import Worker
from kvtransfer.messages import Load
from tests.gateway.cluster_world import LIMITS, hello


def worker(worker_id: str, running: int = 0, waiting: int = 0, usage: float = 0.0, **limits: int) -> Worker:
    introduction = hello(worker_id, limits=msgspec.structs.replace(LIMITS, **limits))
    load = Load(num_running=running, num_waiting=waiting, kv_usage=usage)
    return Worker(hello=introduction, heard_at=0.0, progress_at=0.0, load=load)


def booked(*entries: tuple[str, int]) -> InFlightBook:
    book = InFlightBook()
    for number, (worker_id, num_tokens) in enumerate(entries):
        book.add(worker_id, f"r{number}", num_tokens)
    return book


def pick(prefill, decode, book=None, num_prompt=10) -> tuple[str, str]:
    route = choose(prefill, decode, num_prompt, book or InFlightBook())
    assert isinstance(route, Route)
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
        ([worker("prefill-0", kv_tokens=10), worker("prefill-1", waiting=9)], [], "prefill-1"),
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
        ([worker("decode-0", kv_tokens=10), worker("decode-1", usage=0.9)], [], "decode-1"),
        ([worker("decode-0", running=1), worker("decode-1", running=2)], [("decode-0", 1)] * 3, "decode-1"),
    ],
)
def test_decode_goes_where_the_pressure_is_least(workers, entries, chosen):
    assert pick(ONE_P, workers, booked(*entries)) == ("prefill-0", chosen)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"), [([], ONE_D, "no prefill worker"), (ONE_P, [], "no decode worker")]
)
def test_a_missing_role_is_named(prefill, decode, message):
    assert choose(prefill, decode, 10, InFlightBook()) == Rejection(message, never_fits=False)


def test_a_prompt_that_fits_no_pool_is_rejected_with_both_numbers():
    small = [worker("decode-0", kv_tokens=10)]
    assert pick(ONE_P, small, num_prompt=9) == ("prefill-0", "decode-0")
    rejection = choose(ONE_P, small, 10, InFlightBook())
    assert isinstance(rejection, Rejection)
    assert rejection.never_fits
    assert "has 10 tokens and needs room for 11, but the KV cache holds 10" in rejection.message


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
