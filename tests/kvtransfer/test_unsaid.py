"""Words that share a frame: their order, what a frame may hold, and that none is lost in a burst of them."""

from itertools import chain

import pytest

from kvtransfer.codec import MAX_TEXT_CHARS, PROTOCOL_VERSION, encode
from kvtransfer.errors import MessageError
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_channel import KV_HWM, KvDialer, KvListener
from kvtransfer.kv_messages import (
    MAX_BODY_BYTES,
    MAX_WORDS,
    KvAbort,
    KvDone,
    KvFirstToken,
    KvHeader,
    KvHello,
    KvOffer,
    decode_from_prefill,
)
from kvtransfer.layout import KvBody
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.request_parts import MAX_CHOICES, MAX_LOGPROBS, MAX_TOKEN_ID, Drawn, TokenLogprob
from kvtransfer.unsaid import UnsaidWords
from tests.kvtransfer.fake_pools import DecodeSide, PrefillSide
from tests.kvtransfer.raw_peers import running
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT
from tests.kvtransfer.test_channel import HEADER, free_endpoint, raw_dealer, receive, until


def offers(count: int) -> list[KvOffer]:
    return [KvOffer(f"r{number}", 0, 4) for number in range(count)]


@pytest.fixture
def dialer(listener):
    made = KvDialer("prefill-0/g1")
    made.dial("d", listener.endpoint)
    yield made
    made.close()


def hear(listener, count: int) -> list[list]:
    """Messages with `count` words in all, each as the listener gives it out."""
    messages: list[list] = []

    def have_come() -> bool:
        listener.poll(0.05)
        if words := listener.receive():
            messages.append([(word, body) for _, word, body in words])
        return sum(map(len, messages)) >= count

    assert until(have_come), messages
    return messages


# --- the words themselves


class Outlet:
    """Takes frames, or none while `is_full`."""

    def __init__(self) -> None:
        self.is_full = False
        self.frames: list[tuple[str, bytes]] = []
        self.unsaid = UnsaidWords[str](self._send)

    def _send(self, peer: str, frame: bytes) -> bool:
        if not self.is_full:
            self.frames.append((peer, frame))
        return not self.is_full

    def add(self, peer: str, *words) -> bool:
        return all(self.unsaid.add(peer, encode(word)) for word in words)

    def take(self) -> list:
        """What was sent, decoded."""
        taken, self.frames = self.frames, []
        return [(peer, decode_from_prefill(frame)) for peer, frame in taken]


def test_one_word_goes_as_it_is_and_several_in_order():
    outlet, words = Outlet(), offers(4)
    outlet.add("a", words[0])
    outlet.add("b", *words[1:])
    assert outlet.take() == []
    outlet.unsaid.say_all()
    assert outlet.take() == [("a", words[0]), ("b", words[1:])]
    assert len(outlet.unsaid) == 0
    outlet.unsaid.say_all()
    assert outlet.take() == []


def test_a_frame_holds_as_many_words_as_the_other_side_takes():
    outlet, words = Outlet(), offers(2 * MAX_WORDS + 1)
    assert outlet.add("a", *words)
    outlet.unsaid.say("a")
    assert [said for _, said in outlet.take()] == [words[:MAX_WORDS], words[MAX_WORDS:-1], words[-1]]


def test_what_can_not_be_said_is_kept_and_bounded():
    outlet, words = Outlet(), offers(MAX_WORDS + 1)
    outlet.is_full = True
    assert outlet.add("a", *words[:-1])
    assert not outlet.add("a", words[-1])
    assert not outlet.unsaid.say("a")
    outlet.is_full = False
    assert outlet.unsaid.say("a")
    assert outlet.take() == [("a", words[:-1])]


def test_what_is_forgotten_is_not_said():
    outlet = Outlet()
    outlet.add("a", *offers(2))
    outlet.unsaid.forget("a")
    outlet.unsaid.forget("nobody")
    outlet.unsaid.say_all()
    assert outlet.take() == []


def test_the_longest_words_fit_a_frame():
    logprob = TokenLogprob(-1.5, 1, tuple((MAX_TOKEN_ID, -1.5) for _ in range(MAX_LOGPROBS)))
    siblings = {f"{index:s>128}": Drawn(MAX_TOKEN_ID, logprob) for index in range(MAX_CHOICES - 1)}
    longest = (
        KvFirstToken("r" * 128, 0, MAX_TOKEN_ID, logprob=logprob, siblings=siblings),
        KvAbort("r" * 128, 0, "\N{GRINNING FACE}" * MAX_TEXT_CHARS),
    )
    for word in longest:
        outlet = Outlet()
        outlet.add("a", *[word] * 40)
        outlet.unsaid.say_all()
        assert max(len(frame) for _, frame in outlet.frames) <= MAX_BODY_BYTES / 4, type(word)
        said = [said if isinstance(said, list) else [said] for _, said in outlet.take()]
        assert [*chain(*said)] == [word] * 40


@pytest.mark.parametrize("words", [[], offers(MAX_WORDS + 1), [offers(2)], [KvDone("r", 0)]], ids=range(4))
def test_what_is_no_array_of_words_is_refused(words):
    with pytest.raises(MessageError, match="malformed"):
        decode_from_prefill(encode(words))


# --- on sockets


def test_words_wait_for_the_end_of_the_turn_and_share_a_frame(dialer, listener):
    words = offers(5)
    for word in words:
        assert dialer.send("d", word)
    assert receive(listener, 0.2) is None
    dialer.poll(0)
    assert hear(listener, 5) == [[(word, None) for word in words]]


def test_words_do_not_wait_for_kv_behind_them_whoever_it_is_for(dialer, listener):
    """In one message they would arrive with its last byte."""
    other = KvListener("127.0.0.1", 0)
    body = KvBody(memoryview(b"kkkk"), memoryview(b"vvvv"))
    try:
        dialer.dial("other", other.endpoint)
        dialer.send("d", offers(1)[0])
        dialer.send("other", HEADER, body)
        assert hear(listener, 1) == [[(offers(1)[0], None)]]
        for word in offers(2):
            dialer.send("d", word)
        dialer.send("d", HEADER, body)
        words, [(header, kv)] = hear(listener, 3)
        assert words == [(word, None) for word in offers(2)]
        assert (header, bytes(kv.k), bytes(kv.v)) == (HEADER, b"kkkk", b"vvvv")
    finally:
        other.close()


def test_words_to_several_peers_share_frames_as_those_to_one(dialer, listener):
    other = KvListener("127.0.0.1", 0)
    try:
        dialer.dial("other", other.endpoint)
        for word in offers(5):
            dialer.send("d", word)
            dialer.send("other", word)
        dialer.poll(0)
        assert hear(listener, 5) == hear(other, 5) == [[(word, None) for word in offers(5)]]
    finally:
        other.close()


def test_a_hello_goes_alone_so_that_another_version_can_read_it(dialer, listener):
    hello = KvHello(PROTOCOL_VERSION, "prefill-0", "g1", FINGERPRINT, LAYOUT)
    dialer.send("d", hello)
    for word in offers(2):
        dialer.send("d", word)
    dialer.poll(0)
    assert hear(listener, 3) == [[(hello, None)], [(word, None) for word in offers(2)]]


def test_kv_behind_several_words_is_refused(listener):
    with raw_dealer(listener.endpoint) as raw:
        raw.send_multipart([encode([*offers(1), HEADER]), b"kkkk", b"vvvv"])
        _, fault, _ = receive(listener)
        assert isinstance(fault, MessageError)


def test_words_of_a_link_that_was_hung_up_are_not_said_on_the_next(dialer, listener):
    dialer.send("d", KvOffer("former", 0, 4))
    dialer.hang_up("d")
    dialer.dial("d", listener.endpoint)
    dialer.send("d", KvOffer("latter", 0, 4))
    dialer.poll(0)
    assert hear(listener, 1) == [[(KvOffer("latter", 0, 4), None)]]


def test_what_a_full_queue_does_not_take_is_said_once_it_does():
    endpoint = free_endpoint()
    dialer = KvDialer("prefill-0/g1")
    dialer.dial("d", endpoint)
    body = KvBody(memoryview(b"k"), memoryview(b"v"))
    taken = 0
    while dialer.send("d", KvHeader("r", 0, 0, taken, taken + 1, 0, 2, "float32"), body):
        taken += 1
        if taken == KV_HWM - 1:
            assert dialer.send("d", KvOffer("between", 0, 4))
    assert taken == KV_HWM - 1
    assert not dialer.send("d", KvOffer("beyond", 0, 4))
    listener = KvListener("127.0.0.1", int(endpoint.rpartition(":")[2]))
    try:
        assert until(lambda: dialer.poll(0.05) or dialer.send("d", KvOffer("late", 0, 4)))
        dialer.poll(0)
        words = [word for message in hear(listener, KV_HWM + 1) for word, _ in message]
        assert [type(word) for word in words] == [KvHeader] * (KV_HWM - 1) + [KvOffer, KvOffer]
        assert (words[-2].request_id, words[-1].request_id) == ("between", "late")
    finally:
        dialer.close()
        listener.close()


def test_a_burst_of_answers_far_beyond_the_queue_arrives(dialer, listener):
    count = 3 * KV_HWM
    dialer.send("d", offers(1)[0])
    dialer.poll(0)
    link, _, _ = receive(listener)
    for number in range(count):
        listener.send(link, KvDone(f"r{number}", 0))
    listener.poll(0)
    said: list = []
    assert until(lambda: dialer.poll(0.05) or said.extend(dialer.receive()) or len(said) == count)
    assert said == [("d", KvDone(f"r{number}", 0)) for number in range(count)]


def test_more_transfers_than_the_queue_takes_words_begin_together_and_arrive_at_once():
    """Each is offered, granted and acknowledged in the same moments. What was lost of it would take a keepalive."""
    keys = [(f"r{number}", 0) for number in range(3 * KV_HWM)]
    sides = PrefillSide(num_blocks=len(keys), keepalive=300.0), DecodeSide(num_blocks=len(keys), lease=1200.0)
    with running(*sides) as (prefill, decode):
        for key in keys:
            decode.expect(key, prefill.peer, 4)
        for key in keys:
            prefill.send_all(key, decode.target, 4)
        for key in keys:
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            assert prefill.end_of(key).outcome is TransferOutcome.DONE
