"""One end of a large transfer in a process of its own, which says how much memory that took.

    python -m tests.kvtransfer.memory_process receive            prints its endpoint, then a line at the end
    python -m tests.kvtransfer.memory_process send ENDPOINT      prints a line at the end

Neither end has a pool: KV is made from one small buffer and written over another, so what grows is the transfer's.
"""

import json
import sys
import time
from pathlib import Path

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.frames import FrameOptions
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.kv_channel import KvListener
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvHello
from kvtransfer.layout import KvBody
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.receiver import KvReceiver
from kvtransfer.send_commands import SenderTiming
from kvtransfer.sender import KvSender
from kvtransfer.worker_facts import KvLayout
from tests.kvtransfer.samples import FINGERPRINT

LAYOUT = KvLayout(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
TOKEN_BYTES = 2 * 8 * 128
NUM_TOKENS = 8192
TOTAL_BYTES = NUM_TOKENS * LAYOUT.num_layers * 2 * TOKEN_BYTES
WINDOW = 4 << 20
WARM_UP, LARGE, PEER = ("warm-up", 0), ("large", 0), ("prefill-0", "g1")
PAUSE_EVERY, PAUSE_S = 32, 0.1
"""The slow reader: so many frames, then a pause in which the sender could run far ahead."""


def rss_bytes(line: str = "VmRSS") -> int:
    (found,) = [row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{line}:")]
    return int(found.split()[1]) << 10


class Growth:
    """The most memory that this process has had since now, less what it has now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self._before = rss_bytes()

    @property
    def num_bytes(self) -> int:
        return rss_bytes("VmHWM") - self._before


class Sink:
    """Writes all KV over the same few bytes, slowly."""

    def __init__(self) -> None:
        self._scratch = bytearray(2 * MAX_BODY_BYTES)
        self._num_frames = 0

    def splice(self, key, header, body) -> None:
        self._num_frames += 1
        if self._num_frames % PAUSE_EVERY == 0:
            time.sleep(PAUSE_S)
        self._scratch[: len(body.k)] = body.k
        self._scratch[len(body.k) : len(body.k) + len(body.v)] = body.v

    def finish(self, key) -> None:
        return


class Source:
    """Copies out of the same few bytes, as a gather does."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(MAX_BODY_BYTES))

    def gather(self, key, piece) -> KvBody:
        size = (piece.stop - piece.start) * TOKEN_BYTES
        return KvBody(*(memoryview(bytes(self._scratch[:size])) for _ in "kv"))


def receive() -> None:
    events: Mailbox = Mailbox()
    listener = KvListener("127.0.0.1", 0)
    receiver = KvReceiver(listener, (FINGERPRINT, LAYOUT), "g2", Sink(), ReceiverLimits(WINDOW, 60.0), events)
    receiver.start()
    for key, num_tokens in ((WARM_UP, 256), (LARGE, NUM_TOKENS)):
        receiver.expect(key, PEER, num_tokens)
    say(listener.endpoint)
    growth = None
    while True:
        for event in events.wait(1.0):
            match event:
                case KvOffered(key):
                    growth = Growth()
                    receiver.grant(key, 0)
                case ReceptionEnded(key, outcome):
                    assert outcome is ReceptionOutcome.ARRIVED, event
                    if key == LARGE:
                        say({"growth": growth.num_bytes, "spliced": receiver.counts.spliced_bytes})
                        receiver.stop()
                        return


def send(endpoint: str) -> None:
    events: Mailbox = Mailbox()
    hello = KvHello(PROTOCOL_VERSION, *PEER, FINGERPRINT, LAYOUT)
    sender = KvSender(hello, Source(), events, SenderTiming(5.0, 60.0), options=FrameOptions(with_checksum=True))
    sender.start()
    growth = None
    for key, num_tokens in ((WARM_UP, 256), (LARGE, NUM_TOKENS)):
        growth = Growth()
        sender.open(key, DecodeTarget("decode-0", "g2", endpoint), num_tokens)
        for layer in range(LAYOUT.num_layers):
            sender.ready(layer, [(key, num_tokens)])
        sender.first_token(key, 7)
        ends: list = []
        while not ends:
            ends = events.wait(1.0)
        assert [end.outcome for end in ends] == [TransferOutcome.DONE], ends
    say({"growth": growth.num_bytes})
    sender.stop()


def say(what) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    receive() if sys.argv[1] == "receive" else send(sys.argv[2])
