"""What decode has received: only the next token of a layer, offers on either side of a reservation, ends remembered."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.errors import ProtocolError
from kvtransfer.incoming import (
    MAX_PARKED_OFFERS,
    MAX_REMEMBERED,
    IncomingBook,
    IncomingTransfer,
    ParkedOffer,
    ReceptionOutcome,
)
from kvtransfer.messages import KvHeader

KEY, PEER, STRANGER = ("r", 0), ("prefill-0", "g1"), ("prefill-9", "g1")


def transfer(key=KEY, num_tokens=8, first_token=0, num_layers=2, last_sign=100.0) -> IncomingTransfer:
    incoming = IncomingTransfer(key, PEER, num_tokens, num_layers, last_sign, link=b"link")
    if first_token is not None:
        incoming.grant(first_token)
    return incoming


def header(layer, start, stop) -> KvHeader:
    return KvHeader(*KEY, layer, start, stop, 0, 2, "float32")


def offer(peer=PEER, seen_at=100.0, num_tokens=8) -> ParkedOffer:
    return ParkedOffer(peer, b"link", num_tokens, seen_at)


def splice(incoming, layer, start, stop) -> None:
    incoming.check(header(layer, start, stop))
    incoming.spliced(header(layer, start, stop), (stop - start) * 10)


def test_each_layer_takes_its_tokens_in_order():
    incoming = transfer()
    splice(incoming, 0, 0, 3)
    splice(incoming, 1, 0, 8)
    splice(incoming, 0, 3, 8)
    assert incoming.has_all_kv
    assert incoming.spliced_bytes == 160


@pytest.mark.parametrize(("layer", "start", "stop"), [(0, 2, 4), (0, 4, 5), (1, 1, 2), (0, 3, 9)])
def test_gaps_repeats_and_overruns_are_refused(layer, start, stop):
    incoming = transfer()
    splice(incoming, 0, 0, 3)
    with pytest.raises(ProtocolError, match=f"layer {layer}"):
        incoming.check(header(layer, start, stop))
    assert incoming.spliced_bytes == 30


def test_reception_starts_at_the_first_token_that_is_missing():
    incoming = transfer(first_token=6)
    with pytest.raises(ProtocolError):
        incoming.check(header(0, 0, 2))
    for layer in (0, 1):
        splice(incoming, layer, 6, 8)
    assert incoming.has_all_kv
    assert transfer(first_token=8).has_all_kv


def test_nothing_is_taken_before_the_grant_and_a_grant_comes_once():
    incoming = transfer(num_tokens=1, first_token=None)
    assert not incoming.has_all_kv
    with pytest.raises(ProtocolError, match="before its grant"):
        incoming.check(header(0, 0, 1))
    incoming.grant(1)
    assert incoming.has_all_kv
    with pytest.raises(AssertionError, match="granted twice"):
        incoming.grant(0)
    with pytest.raises(AssertionError, match="before it was offered"):
        IncomingTransfer(KEY, PEER, 1, 1, 0.0).grant(0)


def test_credits_count_from_the_start():
    incoming = transfer()
    splice(incoming, 0, 0, 3)
    assert incoming.uncredited_bytes == 30
    incoming.credited_bytes = incoming.spliced_bytes
    splice(incoming, 1, 0, 1)
    assert incoming.uncredited_bytes == 10


def test_an_offer_before_its_reservation_is_kept_for_it():
    book = IncomingBook()
    book.park(KEY, offer())
    assert book.open(transfer()) == offer()
    assert book.find(KEY, PEER) is not None
    assert IncomingBook().open(transfer()) is None


def test_a_strangers_offer_neither_counts_nor_pushes_the_right_one_out():
    book = IncomingBook()
    book.park(KEY, offer())
    book.park(KEY, offer(STRANGER))
    assert book.open(transfer()) == offer()
    assert book.find(KEY, STRANGER) is None
    book = IncomingBook()
    book.park(KEY, offer(STRANGER))
    assert book.open(transfer()) is None


def test_an_offer_is_replaced_by_its_own_peers_word_only():
    book = IncomingBook()
    withdrawn = ParkedOffer(PEER, b"link", 0, 101.0, abort_reason="gave up")
    book.park(KEY, offer())
    book.park(KEY, ParkedOffer(STRANGER, b"link", 0, 101.0, abort_reason="mine"))
    book.park(("other", 0), withdrawn)
    assert book.open(transfer()) == offer()
    book = IncomingBook()
    book.park(KEY, offer())
    book.park(KEY, withdrawn)
    assert book.open(transfer()) == withdrawn


def test_parked_offers_are_bounded_and_the_oldest_goes():
    book = IncomingBook()
    for number in range(MAX_PARKED_OFFERS):
        assert book.park((str(number), 0), offer()) is None
    book.park(("0", 0), offer(seen_at=101.0))
    assert book.park(("new", 0), offer(seen_at=102.0)) == (("1", 0), offer())
    assert book.open(transfer(("1", 0))) is None
    assert book.open(transfer(("0", 0))) == offer(seen_at=101.0)


def test_a_reception_ends_once_and_is_remembered():
    book = IncomingBook()
    incoming = transfer()
    book.open(incoming)
    with pytest.raises(AssertionError):
        book.open(transfer())
    assert book.ended(KEY) is None
    assert book.close(KEY, ReceptionOutcome.ARRIVED) is incoming
    assert book.close(KEY, ReceptionOutcome.FAILED) is None
    assert book.ended(KEY) is ReceptionOutcome.ARRIVED
    assert len(book) == 0
    assert book.get(KEY) is None


def test_remembered_ends_are_bounded():
    book = IncomingBook()
    for number in range(MAX_REMEMBERED + 1):
        book.open(transfer((str(number), 0)))
        book.close((str(number), 0), ReceptionOutcome.ARRIVED)
    assert book.ended(("0", 0)) is None
    assert book.ended(("1", 0)) is ReceptionOutcome.ARRIVED


def test_silence_is_found_and_stale_offers_are_forgotten():
    book = IncomingBook()
    book.open(transfer(("old", 0), last_sign=10.0))
    book.open(transfer(("new", 0), last_sign=20.0))
    book.open(IncomingTransfer(("not offered", 0), PEER, 8, 2, 1.0))
    book.park(("stale", 0), offer(seen_at=10.0))
    book.park(("fresh", 0), offer(seen_at=20.0))
    assert [entry.key for entry in book.silent_since(15.0)] == [("old", 0)]
    assert book.open(transfer(("stale", 0))) is None
    assert book.open(transfer(("fresh", 0))) is not None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_accepted_covers_each_layer_once(data):
    num_tokens, num_layers = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    first_token = data.draw(st.integers(0, num_tokens))
    incoming = transfer(num_tokens=num_tokens, first_token=first_token, num_layers=num_layers)
    accepted = []
    for _ in range(40):
        layer = data.draw(st.integers(0, num_layers - 1))
        start, stop = sorted(data.draw(st.lists(st.integers(0, num_tokens + 1), min_size=2, max_size=2, unique=True)))
        try:
            splice(incoming, layer, start, stop)
        except ProtocolError:
            continue
        accepted.extend((layer, token) for token in range(start, stop))
    assert len(accepted) == len(set(accepted))
    wanted = {(layer, token) for layer in range(num_layers) for token in range(first_token, num_tokens)}
    assert set(accepted) <= wanted
    assert incoming.has_all_kv == (set(accepted) == wanted)
