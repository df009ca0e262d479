"""What decode has been offered and by which links, offers on either side of a request, ends remembered."""

import pytest

from kvtransfer.errors import ProtocolError
from kvtransfer.incoming import (
    MAX_PARKED_OFFERS,
    MAX_REMEMBERED,
    IncomingBook,
    IncomingTransfer,
    ParkedOffer,
    ReceptionOutcome,
)
from kvtransfer.kv_messages import KvHeader
from tests.kvtransfer.samples import LOGPROB

KEY, PEER, STRANGER = ("r", 0), ("prefill-0", "g1"), ("prefill-9", "g1")


def transfer(key=KEY, num_tokens=8, last_sign=100.0, offered=True) -> IncomingTransfer:
    incoming = IncomingTransfer(key, PEER, num_tokens, num_layers=2, num_heads=4)
    if offered:
        incoming.add_stream(b"link", (0, 4), last_sign)
    return incoming


def offer(peer=PEER, seen_at=100.0, num_tokens=8, link=b"link", heads=(0, 4)) -> ParkedOffer:
    return ParkedOffer(peer, link, heads, num_tokens, seen_at)


def fill(stream) -> None:
    """All KV of one link, and the first token."""
    for layer in (0, 1):
        stream.spliced(KvHeader(*KEY, layer, 0, 8, *stream.heads, "float32"))
    stream.first_token_id = 7


@pytest.mark.parametrize("shards", [[(0, 4)], [(0, 2), (2, 4)], [(1, 4), (0, 1)], [(0, 1), (1, 2), (2, 3), (3, 4)]])
def test_a_transfer_is_all_heads_of_all_links_and_their_first_token(shards):
    incoming = transfer(offered=False)
    for number, heads in enumerate(shards):
        assert not incoming.is_offered
        incoming.add_stream(b"%d" % number, heads, 100.0)
    assert incoming.is_offered
    incoming.grant(0)
    for stream in incoming.streams.values():
        assert not incoming.has_arrived
        fill(stream)
    assert incoming.has_arrived
    assert incoming.first_token_id == 7


@pytest.mark.parametrize("heads", [(0, 4), (1, 2), (0, 2), (1, 4)])
def test_no_head_comes_on_two_links(heads):
    incoming = transfer(offered=False)
    incoming.add_stream(b"a", (0, 2), 100.0)
    with pytest.raises(ProtocolError, match="on another link already"):
        incoming.add_stream(b"b", heads, 100.0)
    incoming.add_stream(b"b", (2, 4), 100.0)
    incoming.grant(0)
    with pytest.raises(ProtocolError, match="on another link already"):
        incoming.add_stream(b"c", (4, 5), 100.0)


def test_part_of_the_heads_is_not_all_of_them():
    incoming = transfer(offered=False)
    incoming.add_stream(b"a", (0, 2), 100.0)
    with pytest.raises(AssertionError, match="before it was offered"):
        incoming.grant(0)


def test_the_first_token_s_log_probability_is_whoever_s_has_said_it():
    incoming = transfer(offered=False)
    for number, heads in enumerate([(0, 2), (2, 4)]):
        incoming.add_stream(b"%d" % number, heads, 100.0)
    assert incoming.first_logprob is None
    incoming.streams[b"1"].first_logprob = LOGPROB
    assert incoming.first_logprob == LOGPROB


def test_links_that_disagree_about_the_first_token_are_in_breach():
    incoming = transfer(offered=False)
    incoming.add_stream(b"a", (0, 2), 100.0)
    incoming.add_stream(b"b", (2, 4), 100.0)
    incoming.grant(0)
    for stream in incoming.streams.values():
        fill(stream)
    incoming.streams[b"b"].first_token_id = 8
    with pytest.raises(ProtocolError, match="disagree about the first token"):
        assert incoming.first_token_id


def test_an_offer_before_its_reservation_is_kept_for_it():
    book = IncomingBook()
    book.park(KEY, offer())
    assert book.open(transfer(offered=False)) == [offer()]
    assert book.find(KEY, PEER) is not None
    assert IncomingBook().open(transfer()) == []


def test_a_strangers_offer_neither_counts_nor_pushes_the_right_one_out():
    book = IncomingBook()
    book.park(KEY, offer())
    book.park(KEY, offer(STRANGER))
    assert book.open(transfer(offered=False)) == [offer()]
    assert book.find(KEY, STRANGER) is None
    book = IncomingBook()
    book.park(KEY, offer(STRANGER))
    assert book.open(transfer()) == []


def test_an_offer_is_replaced_by_its_own_peers_word_only():
    book = IncomingBook()
    withdrawn = ParkedOffer(PEER, b"link", (0, 4), 0, 101.0, abort_reason="gave up")
    book.park(KEY, offer())
    book.park(KEY, ParkedOffer(STRANGER, b"link", (0, 4), 0, 101.0, abort_reason="mine"))
    book.park(("other", 0), withdrawn)
    assert book.open(transfer(offered=False)) == [offer()]
    book = IncomingBook()
    book.park(KEY, offer())
    book.park(KEY, withdrawn)
    assert book.open(transfer()) == [withdrawn]


def test_parked_offers_are_bounded_and_the_oldest_goes():
    book = IncomingBook()
    for number in range(MAX_PARKED_OFFERS):
        assert book.park((str(number), 0), offer()) == []
    book.park(("0", 0), offer(seen_at=101.0))
    book.park(("1", 0), offer(link=b"other", heads=(4, 5)))
    book.park(("1", 0), offer(link=b"other", heads=(4, 5), seen_at=101.0))
    book.park(("0", 0), offer(seen_at=101.0))
    for number in range(2, MAX_PARKED_OFFERS):
        book.park((str(number), 0), offer(seen_at=101.0))
    evicted = book.park(("new", 0), offer(seen_at=102.0))
    assert evicted == [(("1", 0), offer()), (("1", 0), offer(link=b"other", heads=(4, 5), seen_at=101.0))]
    assert book.open(transfer(("1", 0))) == []
    assert book.open(transfer(("0", 0))) == [offer(seen_at=101.0)]


def test_whoever_has_most_parked_offers_makes_room_for_the_others():
    book = IncomingBook()
    book.park(KEY, offer())
    for number in range(MAX_PARKED_OFFERS - 1):
        assert book.park((str(number), 0), offer(STRANGER)) == []
    assert book.park(("more", 0), offer(STRANGER)) == [(("0", 0), offer(STRANGER))]
    assert book.num_parked == MAX_PARKED_OFFERS
    assert book.open(transfer(KEY)) == [offer()]


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
    book.open(transfer(("not offered", 0), offered=False))
    half = transfer(("half silent", 0), offered=False)
    half.add_stream(b"a", (0, 2), 20.0)
    half.add_stream(b"b", (2, 4), 10.0)
    book.open(half)
    book.park(("stale", 0), offer(seen_at=10.0))
    book.park(("fresh", 0), offer(seen_at=20.0))
    assert [entry.key for entry in book.silent_since(15.0)] == [("old", 0), ("half silent", 0)]
    assert book.open(transfer(("stale", 0))) == []
    assert book.open(transfer(("fresh", 0))) == [offer(seen_at=20.0)]
