"""A link made worse on purpose: the bytes come when the arithmetic says, in order, within bounds, or not at all."""

import random
import time

import pytest

from kvtransfer.emulated_link import MAX_QUEUED, QUEUE_BYTES, EmulatedLink, LinkSpec
from kvtransfer.errors import SettingsError
from kvtransfer.frames import FrameOptions
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_messages import KvAbort, KvFirstToken, KvHeader, KvOffer
from kvtransfer.layout import KvBody
from kvtransfer.outgoing import TransferOutcome
from prefill.config import PrefillConfig
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide
from tests.kvtransfer.raw_peers import KEY, running

OFFER = KvOffer(*KEY, 4)
HEADER = KvHeader(*KEY, 0, 0, 4, 0, 2, "float32")


class Outlet:
    """In place of the sockets."""

    def __init__(self) -> None:
        self.passed: list = []
        self.is_full = False
        self.peers: set = set()

    def dial(self, peer, endpoint) -> None:
        self.peers.add(peer)

    def hang_up(self, peer) -> None:
        self.peers.remove(peer)

    def has_room(self, peer) -> bool:
        return not self.is_full

    def send(self, peer, message, body=None) -> bool:
        if not self.is_full:
            self.passed.append((peer, message))
        return not self.is_full


def link(outlet, seed=0, **spec) -> EmulatedLink:
    made = EmulatedLink(LinkSpec(**spec), outlet, random.Random(seed))
    made.dial("d", "tcp://nowhere:1")
    return made


def body(num_bytes=500) -> KvBody:
    return KvBody(memoryview(bytes(num_bytes)), memoryview(bytes(num_bytes)))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("delay=20ms", LinkSpec(0.02)),
        ("delay=1.5s", LinkSpec(1.5)),
        ("bandwidth=1Gbit,delay=0ms", LinkSpec(0.0, 125e6)),
        ("bandwidth=2.5Mbit", LinkSpec(bandwidth=312_500)),
        ("bandwidth=8Kbit, loss=0.01", LinkSpec(bandwidth=1000, loss=0.01)),
        ("bandwidth=8000bit", LinkSpec(bandwidth=1000.0)),
        ("loss=0", LinkSpec()),
    ],
)
def test_what_is_well_formed_is_taken(text, spec):
    assert LinkSpec.parse(text) == spec
    assert PrefillConfig(kv_link=text).link == spec


@pytest.mark.parametrize(
    "text",
    [
        *("delay", "delay=", "delay=20", "delay=20us", "delay=-1ms", "delay=1e3ms", "delay=20ms,", ",", "delay =1s"),
        *(
            "bandwidth=1",
            "bandwidth=1gbit",
            "bandwidth=1Gbyte",
            "bandwidth=0Mbit",
            "bandwidth=inf",
            "jitter=3ms",
            "bandwidth=999bit",
            "delay=61s",
        ),
        *("loss=1", "loss=1%", "loss=-0.1", "loss=nan", "loss=", "delay=1ms,delay=2ms", "Delay=1ms", "delay=٣ms"),
    ],
)
def test_what_is_not_is_refused(text):
    with pytest.raises(SettingsError, match="--kv-link"):
        PrefillConfig(kv_link=text)


def test_the_default_is_the_link_as_it_is():
    assert PrefillConfig().link is None


def test_a_message_comes_after_its_bytes_and_the_delay_behind_those_before_it():
    outlet = Outlet()
    made = link(outlet, delay=1.0, bandwidth=1000.0)
    made.advance(10.0)
    assert made.next_due is None
    for message in (HEADER, HEADER):
        assert made.send("d", message, body())
    assert made.send("d", OFFER)
    for now, count in [(11.99, 0), (12.0, 1), (12.99, 1), (13.0, 3)]:
        made.advance(now)
        assert len(outlet.passed) == count, now
    assert outlet.passed == [("d", HEADER), ("d", HEADER), ("d", OFFER)]
    made.send("d", HEADER, body())
    assert made.next_due == 15.0, "the transmitter has been idle and starts anew"


def test_a_full_pipe_has_no_room_until_something_is_through():
    outlet = Outlet()
    made = link(outlet, bandwidth=1000.0)
    while made.has_room("d"):
        assert made.send("d", HEADER, body(QUEUE_BYTES // 4))
    assert not made.send("d", HEADER, body())
    assert len(made._pipes["d"].held) == 2
    made.advance(QUEUE_BYTES / 2 / 1000.0)
    assert made.has_room("d")
    for _ in range(MAX_QUEUED):
        made.send("d", OFFER)
    assert not made.send("d", OFFER), "messages without KV are bounded too"


def test_a_full_outlet_holds_back_and_loses_nothing():
    outlet = Outlet()
    made = link(outlet)
    made.send("d", OFFER)
    made.send("d", HEADER, body())
    outlet.is_full = True
    made.advance(1.0)
    assert (outlet.passed, made.next_due) == ([], None), "its own wake-up comes when it has room"
    outlet.is_full = False
    made.advance(2.0)
    assert outlet.passed == [("d", OFFER), ("d", HEADER)]


def test_losses_are_of_kv_and_first_tokens_and_as_many_as_asked_for():
    outlet = Outlet()
    made = link(outlet, loss=0.25)
    now = 0.0
    for _ in range(1000):
        for message, part in ((HEADER, body(1)), (KvFirstToken(*KEY, 1), None), (OFFER, None)):
            assert made.send("d", message, part)
        now += 1.0
        made.advance(now)
    assert made._pipes["d"].num_bytes == 0
    passed = [message for _, message in outlet.passed]
    assert passed.count(OFFER) == 1000
    for kind in (KvHeader, KvFirstToken):
        assert 700 < sum(isinstance(message, kind) for message in passed) < 800
    assert made.num_lost == 3000 - len(passed)


def test_what_is_on_its_way_goes_with_the_link():
    outlet = Outlet()
    made = link(outlet, delay=1.0)
    made.send("d", KvAbort(*KEY, "gone"))
    made.hang_up("d")
    made.advance(9.0)
    assert (outlet.passed, outlet.peers, made.next_due) == ([], set(), None)


# --- threads and sockets


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_checksum", [False, True])
def test_transfers_over_a_lossy_link_complete_with_small_leases(seed, with_checksum):
    spec = LinkSpec(delay=0.002, bandwidth=20e6, loss=0.05)
    prefill = PrefillSide(keepalive=0.05, options=FrameOptions(with_checksum), link=spec)
    with running(prefill, DecodeSide(window=6 * TOKEN_BYTES, lease=0.5)) as (_, decode):
        prefill.sender._emulated._dice = random.Random(seed)
        keys = [(f"r{number}", 0) for number in range(6)]
        for key in keys:
            decode.expect(key, prefill.peer, 30)
            prefill.send_all(key, decode.target, 30)
        for key in keys:
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            assert prefill.end_of(key).outcome is TransferOutcome.DONE
        assert prefill.sender._emulated.num_lost > 0
        assert decode.receiver.counts.num_resends > 0
        assert decode.receiver.counts.num_corrupt == 0


def test_a_real_transfer_takes_as_long_as_the_link_says():
    num_tokens, bandwidth, delay = 64, 40_000.0, 0.1
    with running(PrefillSide(link=LinkSpec(delay, bandwidth)), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, num_tokens)
        before = time.monotonic()
        prefill.send_all(KEY, decode.target, num_tokens)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        took = time.monotonic() - before
        prefill.end_of(KEY)
    least = num_tokens * 2 * 2 * TOKEN_BYTES / bandwidth + 2 * delay  # the offer's way, then the KV's
    assert least <= took < least + 2.0
