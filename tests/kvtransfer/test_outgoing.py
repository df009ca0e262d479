"""What prefill owes: the window holds, each (layer, token) is shipped exactly once, the oldest chunk first."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.errors import ProtocolError
from kvtransfer.outgoing import OutgoingBook, OutgoingTransfer, Piece

BYTES = 10  # of one token and layer, K and V


def transfer(num_tokens=8, num_layers=2, max_piece_tokens=4, key=("r", 0), together_bytes=0) -> OutgoingTransfer:
    return OutgoingTransfer(key, num_tokens, num_layers, BYTES, max_piece_tokens, together_bytes=together_bytes)


def ship(outgoing: OutgoingTransfer) -> list[Piece]:
    """Ships all that may go now."""
    pieces = []
    while piece := outgoing.next_piece():
        outgoing.shipped(piece)
        pieces.append(piece)
    return pieces


def test_nothing_goes_without_a_grant_or_before_it_is_computed():
    outgoing = transfer()
    outgoing.mark_ready(0, 4)
    assert outgoing.next_piece() is None
    outgoing.grant(0, 1000)
    assert ship(outgoing) == [Piece(0, 0, 4)]
    outgoing.mark_ready(1, 4)
    assert ship(outgoing) == [Piece(1, 0, 4)]
    assert not outgoing.all_shipped


def test_a_piece_is_never_longer_than_a_frame():
    outgoing = transfer(num_layers=1)
    outgoing.grant(0, 1000)
    outgoing.mark_ready(0, 7)
    assert ship(outgoing) == [Piece(0, 0, 4), Piece(0, 4, 7)]


def test_the_chunk_that_has_waited_longest_goes_first():
    outgoing = transfer()
    outgoing.grant(0, 1000)
    for stop in (4, 8):
        for layer in (0, 1):
            outgoing.mark_ready(layer, stop)
    assert ship(outgoing) == [Piece(0, 0, 4), Piece(1, 0, 4), Piece(0, 4, 8), Piece(1, 4, 8)]
    assert outgoing.all_shipped


def test_layers_that_are_ready_at_once_go_together_up_to_a_size():
    outgoing = transfer(num_layers=5, together_bytes=3 * 2 * BYTES)
    outgoing.grant(0, 1000)
    for layer in range(4):
        outgoing.mark_ready(layer, 2)
    assert ship(outgoing) == [Piece(0, 0, 2, num_layers=3), Piece(3, 0, 2)]
    assert outgoing.sent_bytes == 4 * 2 * BYTES
    outgoing.mark_ready(4, 8)
    outgoing.mark_ready(3, 8)
    assert ship(outgoing) == [Piece(4, 0, 4), Piece(3, 2, 6), Piece(4, 4, 8), Piece(3, 6, 8)]
    for layer in range(3):
        outgoing.mark_ready(layer, 4)
    assert ship(outgoing) == [Piece(0, 2, 4, num_layers=3)]


def test_layers_that_go_together_keep_within_the_window():
    outgoing = transfer(num_tokens=2, num_layers=3, together_bytes=1000)
    outgoing.grant(0, 5 * BYTES)
    for layer in range(3):
        outgoing.mark_ready(layer, 2)
    assert ship(outgoing) == [Piece(0, 0, 2, num_layers=2), Piece(2, 0, 1)]
    outgoing.credit(5 * BYTES)
    assert ship(outgoing) == [Piece(2, 1, 2)]
    assert outgoing.all_shipped


def test_what_was_asked_for_again_goes_alone():
    """Each layer has a number of its own, and a frame names one."""
    outgoing = transfer(num_tokens=2, num_layers=4, together_bytes=1000)
    outgoing.grant(0, 1000)
    for layer in range(4):
        outgoing.mark_ready(layer, 2)
    assert ship(outgoing) == [Piece(0, 0, 2, num_layers=4)]
    outgoing.resend(1, 0, 1)
    outgoing.resend(2, 0, 2)
    assert not outgoing.all_shipped
    assert ship(outgoing) == [Piece(1, 0, 2), Piece(2, 0, 2)]
    assert outgoing.all_shipped


def test_the_window_is_kept_to_the_byte_and_credits_open_it():
    outgoing = transfer(num_layers=1)
    outgoing.grant(0, 39)
    outgoing.mark_ready(0, 8)
    assert ship(outgoing) == [Piece(0, 0, 3)]
    outgoing.credit(10)
    assert ship(outgoing) == [Piece(0, 3, 4)]
    outgoing.credit(40)
    assert ship(outgoing) == [Piece(0, 4, 7)]
    assert outgoing.in_flight_bytes == 30


def test_a_window_smaller_than_a_token_lets_one_token_at_a_time_through():
    outgoing = transfer(num_layers=1, num_tokens=3)
    outgoing.grant(0, 1)
    outgoing.mark_ready(0, 3)
    for token in range(3):
        assert ship(outgoing) == [Piece(0, token, token + 1)]
        outgoing.credit(BYTES * (token + 1))
    assert outgoing.all_shipped


def test_only_tokens_from_the_granted_one_on_are_shipped():
    outgoing = transfer()
    outgoing.mark_ready(0, 4)
    outgoing.grant(5, 1000)
    assert ship(outgoing) == []
    for layer in (0, 1):
        outgoing.mark_ready(layer, 8)
    assert ship(outgoing) == [Piece(0, 5, 8), Piece(1, 5, 8)]
    assert outgoing.all_shipped


def test_a_receiver_that_has_it_all_gets_no_piece():
    outgoing = transfer()
    outgoing.grant(8, 1000)
    assert outgoing.all_shipped
    assert ship(outgoing) == []


def test_a_repeated_grant_changes_nothing():
    outgoing = transfer(num_layers=1)
    outgoing.grant(0, 20)
    outgoing.mark_ready(0, 8)
    ship(outgoing)
    outgoing.grant(0, 1000)
    assert ship(outgoing) == []


def test_breaches_of_the_receiver_are_protocol_errors():
    outgoing = transfer()
    with pytest.raises(ProtocolError, match="from token 9 of 8"):
        outgoing.grant(9, 10)
    outgoing.grant(0, 1000)
    outgoing.mark_ready(0, 2)
    ship(outgoing)
    with pytest.raises(ProtocolError, match="21 bytes, 20 sent"):
        outgoing.credit(21)
    outgoing.credit(20)
    outgoing.credit(10)
    assert outgoing.credited_bytes == 20


def test_a_resend_goes_back_and_what_was_sent_stays_in_flight():
    outgoing = transfer()
    outgoing.grant(0, 1000)
    for layer in (0, 1):
        outgoing.mark_ready(layer, 8)
    ship(outgoing)
    outgoing.first_token_sent = True
    assert outgoing.resend(1, 3, number=2) == 5 * BYTES
    assert (outgoing.all_shipped, outgoing.first_token_sent) == (False, False)
    assert (outgoing.resend_of(0), outgoing.resend_of(1), outgoing.num_resends) == (0, 2, 2)
    assert outgoing.in_flight_bytes == 16 * BYTES
    assert ship(outgoing) == [Piece(1, 3, 7), Piece(1, 7, 8)]
    assert outgoing.in_flight_bytes == 21 * BYTES
    outgoing.credit(21 * BYTES)
    assert outgoing.resend(0, 8, number=1) == 0, "asked for before, heard after: nothing of it is missing"
    assert outgoing.num_resends == 2


def test_a_resend_keeps_to_the_window():
    outgoing = transfer(num_layers=1)
    outgoing.grant(0, 40)
    outgoing.mark_ready(0, 8)
    assert ship(outgoing) == [Piece(0, 0, 4)]
    outgoing.resend(0, 0, number=1)
    assert ship(outgoing) == []
    outgoing.credit(20)
    assert ship(outgoing) == [Piece(0, 0, 2)]


def test_a_resend_that_was_heard_already_changes_nothing():
    outgoing = transfer(num_layers=1)
    outgoing.grant(0, 1000)
    outgoing.mark_ready(0, 8)
    ship(outgoing)
    outgoing.resend(0, 4, number=1)
    ship(outgoing)
    assert outgoing.resend(0, 4, number=1) == 0
    assert outgoing.all_shipped


@pytest.mark.parametrize(
    ("layer", "start"), [(2, 0), (0, 1), (0, 5)], ids=["layer", "before the grant", "not sent yet"]
)
def test_a_resend_of_what_was_never_sent_is_a_breach(layer, start):
    outgoing = transfer()
    with pytest.raises(ProtocolError, match="resend of layer"):
        outgoing.resend(0, 0, number=1)
    outgoing.grant(2, 1000)
    outgoing.mark_ready(0, 4)
    ship(outgoing)
    with pytest.raises(ProtocolError, match="resend of layer"):
        outgoing.resend(layer, start, number=1)


def test_another_dtype_holds_from_the_grant_on():
    outgoing = transfer(num_layers=1)
    outgoing.mark_ready(0, 8)
    outgoing.pack("float8_e4m3fn", 5, 6)
    outgoing.grant(0, 1000)
    outgoing.pack("float16", 10, 4)
    assert ship(outgoing) == [Piece(0, 0, 6, "float8_e4m3fn"), Piece(0, 6, 8, "float8_e4m3fn")]
    assert outgoing.in_flight_bytes == 8 * 5


def test_own_bugs_are_assertions():
    outgoing = transfer()
    outgoing.mark_ready(0, 4)
    with pytest.raises(AssertionError):
        outgoing.mark_ready(0, 3)
    with pytest.raises(AssertionError):
        outgoing.mark_ready(0, 9)
    with pytest.raises(AssertionError):
        outgoing.shipped(Piece(0, 1, 2))


def test_the_book_is_oldest_first_and_closes_once():
    book = OutgoingBook()
    first, second = transfer(key=("a", 0)), transfer(key=("a", 1))
    book.open(first)
    book.open(second)
    assert [entry.key for entry in book] == [("a", 0), ("a", 1)]
    with pytest.raises(AssertionError):
        book.open(transfer(key=("a", 0)))
    assert book.close(("a", 0)) is first
    assert book.close(("a", 0)) is None
    assert book.find(("a", 0)) is None
    assert book.find(("a", 1)) is second
    assert len(book) == 1


class Interleaving:
    """One transfer, to which events happen as `data` draws them. Keeps what is ready and what was shipped by itself."""

    def __init__(self, data) -> None:
        self.draw = data.draw
        self.num_tokens, self.num_layers = self.draw(st.integers(1, 12)), self.draw(st.integers(1, 3))
        self.first_token = self.draw(st.integers(0, self.num_tokens))
        self.window = self.draw(st.integers(1, 80))
        self.outgoing = transfer(self.num_tokens, self.num_layers, self.draw(st.integers(1, 5)))
        self.ready, self.shipped, self.granted = [0] * self.num_layers, [], False

    def longest_waiting(self) -> tuple[int, int]:
        """The slow way: looks at every layer."""
        layers = range(self.num_layers)
        sent = [self.first_token + sum(layer == index for layer, _ in self.shipped) for index in layers]
        return min((sent[layer], layer) for layer in layers if sent[layer] < self.ready[layer])

    def ship(self) -> None:
        for _ in range(self.draw(st.integers(0, 4))):
            if (piece := self.outgoing.next_piece()) is None:
                return
            assert piece.start < piece.stop <= self.ready[piece.layer]
            assert (piece.start, piece.layer) == self.longest_waiting()
            self.take(piece)
            assert self.outgoing.in_flight_bytes <= max(self.window, BYTES)

    def take(self, piece) -> None:
        self.outgoing.shipped(piece)
        self.shipped.extend((piece.layer, token) for token in range(piece.start, piece.stop))

    def happen(self) -> None:
        """One of the events that may come now."""
        events = ["ship"]
        events += ["ready"] if min(self.ready) < self.num_tokens else []
        events += [] if self.granted else ["grant"]
        events += ["credit"] if self.outgoing.in_flight_bytes else []
        event = self.draw(st.sampled_from(events))
        if event == "ready":
            layer = min(range(self.num_layers), key=lambda index: self.ready[index])
            self.ready[layer] = self.draw(st.integers(self.ready[layer] + 1, self.num_tokens))
            self.outgoing.mark_ready(layer, self.ready[layer])
        elif event == "grant":
            self.outgoing.grant(self.first_token, self.window)
            self.granted = True
        elif event == "credit":
            self.outgoing.credit(self.draw(st.integers(self.outgoing.credited_bytes, self.outgoing.sent_bytes)))
        else:
            self.ship()

    def finish(self) -> None:
        """By the shortest way: hypothesis may idle for long."""
        self.outgoing.grant(self.first_token, self.window)
        for layer in range(self.num_layers):
            self.ready[layer] = self.num_tokens
            self.outgoing.mark_ready(layer, self.num_tokens)
        while piece := self.outgoing.next_piece():
            self.take(piece)
            self.outgoing.credit(self.outgoing.sent_bytes)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_interleaving_ships_every_token_of_every_layer_once(data):
    it = Interleaving(data)
    for _ in range(400):
        it.happen()
        if it.outgoing.all_shipped:
            break
    else:
        it.finish()
    expected = [(layer, token) for layer in range(it.num_layers) for token in range(it.first_token, it.num_tokens)]
    assert sorted(it.shipped) == expected
    assert it.outgoing.all_shipped


def test_a_transfer_is_stuck_if_bytes_are_in_flight_and_no_credit_came_since_it_was_asked_last():
    outgoing = transfer(num_layers=1)
    assert [outgoing.is_stuck(), outgoing.is_stuck()] == [False, False]
    outgoing.grant(0, 40)
    outgoing.mark_ready(0, 8)
    ship(outgoing)
    assert outgoing.is_stuck()
    outgoing.credit(20)
    assert not outgoing.is_stuck()
    assert outgoing.is_stuck()
    outgoing.credit(40)
    assert [outgoing.is_stuck(), outgoing.is_stuck()] == [False, False]
