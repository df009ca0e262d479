"""Whoever is at the other end of a KV link, and whatever he does how fast, the log has a ceiling, and says what it left
out."""

import logging
from itertools import count

import msgspec
import pytest

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.kv_messages import KvHello, KvOffer, KvWelcome
from kvtransfer.line_budget import MAX_LOGGED_CHARS, NUM_LINES, PERIOD_S
from kvtransfer.messages import DecodeTarget, Refused
from kvtransfer.receive_commands import Expect, Grant, ReceiverLimits
from kvtransfer.receive_machine import ReceiveMachine
from kvtransfer.send_commands import Open, SenderTiming
from kvtransfer.send_machine import SendMachine
from kvtransfer.worker_lines import MAX_NAMED
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

PEER = "prefill-0"
TARGET = DecodeTarget("decode-0", "g", "tcp://127.0.0.1:9")
OTHER_MODEL = msgspec.structs.replace(FINGERPRINT, weights="w9")


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="kvtransfer")


class Decode:
    """A receive machine, and prefill workers at the other end of its links."""

    def __init__(self) -> None:
        limits = ReceiverLimits(window_bytes=1 << 20, lease=60.0)
        self.machine = ReceiveMachine((FINGERPRINT, LAYOUT), "g", self, limits, lambda *_: True, lambda _: None)
        self.now = 0.0
        self.numbers = count()

    def introduce(self, worker_id=PEER, generation="g", fingerprint=FINGERPRINT, link=None) -> bytes:
        link = link or f"{worker_id}/{generation}/nonce".encode()
        hello = KvHello(PROTOCOL_VERSION, worker_id, generation, fingerprint, LAYOUT)
        self.machine.on_message(link, hello, None, self.now)
        return link

    def tick(self) -> None:
        self.machine.sweep(self.now)

    # --- each of these is worth so many lines

    def says_hello(self) -> int:
        self.introduce()
        return 1

    def is_refused(self) -> int:
        self.introduce(fingerprint=OTHER_MODEL)
        return 1

    def is_refused_under_ever_new_names(self) -> int:
        self.introduce(f"prefill-{next(self.numbers)}", fingerprint=OTHER_MODEL)
        return 1

    def breaks_the_protocol_under_ever_new_names(self) -> int:
        link = self.introduce(generation=f"g{next(self.numbers)}")
        self.machine.on_message(link, MessageError("no message"), None, self.now)
        return 2

    def loses_kv(self) -> int:
        """All of what it sends of a transfer, however often it is asked for."""
        key = (f"r{next(self.numbers)}", 0)
        link = f"{PEER}/g/nonce".encode()
        self.machine.apply(Expect(key, (PEER, "g"), 4), self.now)
        self.machine.on_message(link, KvOffer(*key, 4), None, self.now)
        self.machine.apply(Grant(key, 0), self.now)
        for number in count():
            if not len(self.machine):
                return 1
            self.machine.on_message(link, KvOffer(*key, 4, number + 1, number), None, self.now)
        raise AssertionError("unreachable")


class Prefill:
    """A send machine, and decode workers at the other end of its links."""

    def __init__(self, keepalive=1.0) -> None:
        hello = KvHello(PROTOCOL_VERSION, PEER, "g", FINGERPRINT, LAYOUT)
        timing = SenderTiming(keepalive, lease=4.0 * keepalive)
        self.machine = SendMachine(hello, self, self, lambda _: None, timing)
        self.now = 0.0
        self.numbers = count()

    def dial(self, peer, endpoint) -> None:
        if endpoint == "nowhere":
            raise SettingsError("cannot be dialled")

    def hang_up(self, peer) -> None:
        return

    def send(self, peer, message, body=None) -> bool:
        return True

    def has_room(self, peer) -> bool:
        return True

    def open(self, target=TARGET) -> str:
        self.machine.apply(Open((f"r{next(self.numbers)}", 0), target, 4), self.now)
        return target.worker_id

    def hear(self, peer, *messages) -> None:
        for message in messages:
            self.machine.on_message(peer, message, self.now)

    def tick(self) -> None:
        self.machine.ship(self.now)

    # --- each of these is worth so many lines

    def has_no_address(self) -> int:
        self.open(DecodeTarget("decode-0", "g", "nowhere"))
        return 1

    def refuses(self) -> int:
        self.hear(self.open(), Refused("x" * 2000, again=True))
        return 1

    def was_restarted(self) -> int:
        self.hear(self.open(), KvWelcome("another"))
        return 1

    def breaks_the_protocol(self) -> int:
        self.hear(self.open(), KvWelcome("g"), MessageError("no message"))
        return 2

    def loses_track_of_us(self) -> int:
        self.hear(self.open(), KvWelcome("g"), Refused("who are you?"))
        return 2


FLOODS = [
    (Decode, "says_hello"),
    (Decode, "is_refused"),
    (Decode, "is_refused_under_ever_new_names"),
    (Decode, "breaks_the_protocol_under_ever_new_names"),
    (Decode, "loses_kv"),
    (Prefill, "has_no_address"),
    (Prefill, "refuses"),
    (Prefill, "was_restarted"),
    (Prefill, "breaks_the_protocol"),
    (Prefill, "loses_track_of_us"),
]


def left_out(lines) -> int:
    """How many lines the log says it was spared."""
    return sum(int(line.split(": ")[1].split()[0]) for line in lines if " more lines about " in line)


@pytest.mark.parametrize(("kind", "event"), FLOODS)
def test_a_flood_is_a_few_lines_in_a_period_and_a_count_of_the_others(kind, event, caplog):
    end, num_lines, num_periods = kind(), 0, 5
    if event == "loses_kv":
        end.introduce()
        caplog.clear()
    for _ in range(num_periods):
        for _ in range(200):
            num_lines += getattr(end, event)()
            end.tick()
            end.now += PERIOD_S / 200
        end.now = float(round(end.now))
    end.now += PERIOD_S
    end.tick()
    lines = caplog.messages
    assert len(lines) == num_periods * (NUM_LINES + 1)
    assert len(lines) - num_periods + left_out(lines) == num_lines, "nothing is hidden"
    assert max(map(len, lines)) <= MAX_LOGGED_CHARS


@pytest.mark.parametrize(("kind", "event"), FLOODS)
def test_now_and_then_is_told_in_full(kind, event, caplog):
    end = kind()
    if event == "loses_kv":
        end.introduce()
        caplog.clear()
    num_lines = 0
    for _ in range(20):
        num_lines += getattr(end, event)()
        end.tick()
        end.now += PERIOD_S / 2
    assert len(caplog.messages) == num_lines
    assert left_out(caplog.messages) == 0


def test_workers_of_ever_new_ids_have_a_ceiling_together(caplog):
    decode = Decode()
    for number in range(500):
        decode.introduce(f"prefill-{number}")
    assert len(caplog.messages) == MAX_NAMED + NUM_LINES
    decode.now += PERIOD_S
    decode.tick()
    assert caplog.messages[-1] == f"worker '(others)': {500 - MAX_NAMED - NUM_LINES} more lines about it"


def test_a_worker_that_floods_the_log_hides_no_other(caplog):
    decode = Decode()
    for _ in range(100):
        decode.says_hello()
        decode.is_refused_under_ever_new_names()
    caplog.clear()
    decode.introduce("other")
    assert caplog.messages == ["prefill worker other is connected"]


def test_one_that_says_it_is_another_does_not_use_up_its_lines(caplog):
    decode = Decode()
    link = decode.introduce()
    for _ in range(100):
        decode.introduce(link=b"evil/g/nonce")
    caplog.clear()
    decode.machine.on_message(link, MessageError("no message"), None, decode.now)
    assert caplog.messages == [f"KV peer {PEER} broke the protocol: no message"]


def test_a_period_ends_in_time_however_long_the_keepalive_is(caplog):
    prefill = Prefill(keepalive=900.0)
    for _ in range(100):
        prefill.refuses()
        prefill.tick()
    caplog.clear()
    for _ in range(int(PERIOD_S) + 2):
        prefill.now += 1.0
        prefill.tick()
    prefill.refuses()
    assert [" more lines about " in line for line in caplog.messages] == [True, False]


def test_losses_hide_no_breach(caplog):
    decode = Decode()
    link = decode.introduce()
    for _ in range(100):
        decode.loses_kv()
    caplog.clear()
    decode.machine.on_message(link, MessageError("no message"), None, decode.now)
    assert caplog.messages == [f"KV peer {PEER} broke the protocol: no message"]
    decode.now += PERIOD_S
    decode.tick()
    assert caplog.messages[-1] == f"worker {PEER!r}: {100 - NUM_LINES} more lines about KV lost on the way from it"
