"""Words that share a frame: their order, what a frame may hold, and that none is lost in a burst of them."""

import pytest

from kvtransfer.codec import MAX_TEXT_CHARS, encode
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
    KvOffer,
    decode_from_prefill,
)
from kvtransfer.layout import KvBody
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.request_parts import MAX_CHOICES, MAX_LOGPROBS, MAX_TOKEN_ID, Drawn, TokenLogprob
from kvtransfer.unsaid import UnsaidWords
from tests.kvtransfer.fake_pools import DecodeSide, PrefillSide
from tests.kvtransfer.raw_peers import running
from tests.kvtransfer.test_channel import HEADER, free_endpoint, receive, until


def offers(count: int) -> list[KvOffer]:
    return [KvOffer(f"r{number}", 0, 4) for number in range(count)]


@pytest.fixture
def listener():
    made = KvListener("127.0.0.1", 0)
    yield made
    made.close()


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


def test_one_word_goes_as_it_is_and_several_in_order():
    unsaid = UnsaidWords[str]()
    words = offers(3)
    unsaid.add("a", encode(words[0]))
    assert decode_from_prefill(unsaid.frame("a")) == words[0]
    unsaid.add("a", encode(words[1]))
    unsaid.add("b", encode(words[2]))
    assert decode_from_prefill(unsaid.frame("a")) == words[:2]
    assert decode_from_prefill(unsaid.frame("a", [encode(words[2])])) == words
    assert unsaid.peers == ["a", "b"]
    unsaid.forget("a")
    assert unsaid.peers == ["b"]
    assert decode_from_prefill(unsaid.frame("a", [encode(words[0])])) == words[0]


def test_a_frame_holds_as_many_words_as_the_other_side_takes():
    unsaid = UnsaidWords[str]()
    while not unsaid.is_full("a"):
        unsaid.add("a", encode(KvOffer("r", 0, 4)))
    assert len(decode_from_prefill(unsaid.frame("a", [encode(HEADER)]))) == MAX_WORDS
    with pytest.raises(AssertionError, match=f"{MAX_WORDS - 1} words wait for 'a'"):
        unsaid.add("a", encode(HEADER))


def test_the_longest_words_fit_a_frame():
    """Two of them: one may be added as long as the first alone is not too long, and one goes behind."""
    logprob = TokenLogprob(-1.5, 1, tuple((MAX_TOKEN_ID, -1.5) for _ in range(MAX_LOGPROBS)))
    siblings = {f"{index:s>128}": Drawn(MAX_TOKEN_ID, logprob) for index in range(MAX_CHOICES - 1)}
    longest = (
        KvFirstToken("r" * 128, 0, MAX_TOKEN_ID, logprob=logprob, siblings=siblings),
        KvAbort("r" * 128, 0, "\N{GRINNING FACE}" * MAX_TEXT_CHARS),
    )
    for word in longest:
        unsaid = UnsaidWords[str]()
        while not unsaid.is_full("a"):
            unsaid.add("a", encode(word))
        frame = unsaid.frame("a", [encode(word)])
        assert len(frame) <= MAX_BODY_BYTES, type(word)
        assert decode_from_prefill(frame)[-1] == word


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


def test_kv_takes_the_words_before_it_along_and_belongs_to_the_last(dialer, listener):
    words = [*offers(2), HEADER]
    for word in words[:2]:
        dialer.send("d", word)
    assert dialer.send("d", HEADER, KvBody(memoryview(b"kkkk"), memoryview(b"vvvv")))
    [message] = hear(listener, 3)
    assert [word for word, _ in message] == words
    assert [body is None for _, body in message] == [True, True, False]
    assert (bytes(message[2][1].k), bytes(message[2][1].v)) == (b"kkkk", b"vvvv")


def test_words_to_one_peer_do_not_wait_for_the_kv_of_another(dialer, listener):
    other = KvListener("127.0.0.1", 0)
    try:
        dialer.dial("other", other.endpoint)
        dialer.send("d", offers(1)[0])
        dialer.send("other", HEADER, KvBody(memoryview(b"kkkk"), memoryview(b"vvvv")))
        assert hear(listener, 1) == [[(offers(1)[0], None)]]
    finally:
        other.close()


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
    assert taken == KV_HWM
    assert not dialer.send("d", KvOffer("beyond", 0, 4))
    listener = KvListener("127.0.0.1", int(endpoint.rpartition(":")[2]))
    try:
        assert until(lambda: dialer.poll(0.05) or dialer.send("d", KvOffer("late", 0, 4)))
        dialer.poll(0)
        words = [word for message in hear(listener, KV_HWM + 2) for word, _ in message]
        assert [type(word) for word in words] == [KvHeader] * (KV_HWM - 1) + [KvOffer, KvHeader, KvOffer]
        assert (words[-3].request_id, words[-1].request_id) == ("between", "late")
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
