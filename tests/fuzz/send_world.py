"""The send machine with an engine that behaves and decode workers that need not. Decode 0 is honest: whatever the
others say, what is sent to it must be right and complete. Steps are lists that JSON can hold:

    ["open", KEY], ["compute", KEY, TOKENS], ["abort", KEY]     the engine
    ["answer", KEY]                       KEY's decode worker says what is due: welcome, grant, credits, done
    ["say", PEER, tree]                   a decode worker that is not honest says something
    ["full", PEER, bool], ["pass", SECONDS]
"""

from itertools import product
from typing import Any

from kvtransfer.codec import PROTOCOL_VERSION, encode
from kvtransfer.errors import SettingsError
from kvtransfer.frames import TOGETHER_BYTES, FrameOptions
from kvtransfer.kv_messages import (
    KvAbort,
    KvCredit,
    KvDone,
    KvFirstToken,
    KvGrant,
    KvHeader,
    KvHello,
    KvWelcome,
    decode_from_decode,
    decode_from_prefill,
)
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.send_commands import Abort, FirstToken, Open, Ready, SenderTiming
from kvtransfer.send_machine import SendMachine
from kvtransfer.worker_lines import MAX_NAMED
from tests.fuzz.hostile import frame_of
from tests.kvtransfer.fake_pools import TOKEN_BYTES, HashPool, content
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

NUM_KEYS, NUM_PEERS, HONEST = 6, 3, 0
WINDOW = 8 * TOKEN_BYTES
KEEPALIVE, LEASE = 5.0, 60.0


def key_of(index: int) -> tuple[str, int]:
    return (f"r{index}", index % 2)


def tokens_of(index: int) -> int:
    return 2 + 2 * index


class Outlet:
    """Links that remember what went out; `full` ones take nothing."""

    def __init__(self, world: "SendWorld") -> None:
        self._world = world
        self.open: set[str] = set()
        self.full: set[str] = set()

    def dial(self, peer: str, endpoint: str) -> None:
        assert peer not in self.open, f"{peer} is dialled already"
        if endpoint == "nowhere":
            raise SettingsError("cannot be dialled")
        self.open.add(peer)

    def hang_up(self, peer: str) -> None:
        self.open.remove(peer)

    def has_room(self, peer: str) -> bool:
        assert peer in self.open, f"{peer} is not dialled"
        return peer not in self.full

    def send(self, peer: str, message, body=None) -> bool:
        if not self.has_room(peer):
            return False
        assert decode_from_prefill(encode(message)) == message, "the peer could not read this"
        self._world.on_sent(peer, message, body)
        return True


class SendWorld:
    """One send machine, its engine, and the decode workers that it dials."""

    def __init__(self) -> None:
        self.pool = HashPool(num_blocks=16, block_size=4)
        self.outlet = Outlet(self)
        self.now = 100.0
        self.opened: dict = {}  # key to index
        self.computed: dict = {}
        self.ends: dict = {}
        self.arrived: dict = {}  # of the honest peer's keys: bytes that came
        self.first_tokens: set = set()
        self.granted: set = set()
        hello = KvHello(PROTOCOL_VERSION, "prefill-0", "g1", FINGERPRINT, LAYOUT)
        options = FrameOptions(together_bytes=TOGETHER_BYTES)
        timing = SenderTiming(KEEPALIVE, LEASE)
        self.machine = SendMachine(hello, self.pool, self.outlet, self._report, timing, options)

    def peer_of(self, key) -> str:
        return f"decode-{self.opened[key] % NUM_PEERS}"

    # --- what the machine does

    def _report(self, event: TransferEnded) -> None:
        assert event.key in self.opened, event
        assert event.key not in self.ends, f"twice: {event}"
        self.ends[event.key] = event.outcome
        if event.outcome is TransferOutcome.DONE and self.opened[event.key] % NUM_PEERS == HONEST:
            assert event.key in self.first_tokens, f"{event.key} was taken for done before it was sent"
        self.pool.free(event.key)

    def on_sent(self, peer: str, message, body) -> None:
        if isinstance(message, KvAbort | KvHello):
            return
        key = (message.request_id, message.attempt)
        assert key in self.pool.tables, f"about a transfer that is over: {message}"
        assert peer == self.peer_of(key), "KV of one request sent to another's worker"
        if isinstance(message, KvHeader):
            for index, (layer, token) in enumerate(product(message.layers, range(message.start, message.stop))):
                offset = index * TOKEN_BYTES
                for part, sent in enumerate((body.k, body.v)):
                    expected = content(key, layer, part, token)
                    assert bytes(sent[offset : offset + TOKEN_BYTES]) == expected, (key, message, token)
            self.arrived[key] = self.arrived.get(key, 0) + len(body.k) + len(body.v)
        elif isinstance(message, KvFirstToken):
            self.first_tokens.add(key)

    # --- steps

    def play(self, step: list) -> None:
        name, *args = step
        getattr(self, f"_{name}")(*args)
        for _ in range(4):
            self.machine.ship(self.now)
        self.check()

    def _open(self, index: int) -> None:
        key = key_of(index)
        if key in self.opened:
            return
        self.opened[key], self.computed[key] = index, 0
        self.pool.allocate(key, tokens_of(index))
        peer = index % NUM_PEERS
        endpoint = "nowhere" if index == 5 else f"tcp://127.0.0.1:{9 + peer}"
        self.machine.apply(Open(key, DecodeTarget(f"decode-{peer}", "g2", endpoint), tokens_of(index)), self.now)

    def _compute(self, index: int, count: int) -> None:
        key = key_of(index)
        if key not in self.pool.tables or self.computed[key] == tokens_of(index):
            return
        stop = min(tokens_of(index), self.computed[key] + count)
        for layer in range(LAYOUT.num_layers):
            for part in (0, 1):
                for token in range(self.computed[key], stop):
                    self.pool.write(key, layer, part, token, content(key, layer, part, token))
            self.machine.apply(Ready(layer, ((key, stop),)), self.now)
        self.computed[key] = stop
        if stop == tokens_of(index):
            self.machine.apply(FirstToken(key, 7), self.now)

    def _abort(self, index: int) -> None:
        self.machine.apply(Abort(key_of(index), "enough", tell_peer=True), self.now)

    def _answer(self, index: int) -> None:
        key = key_of(index)
        if key not in self.pool.tables:
            return
        peer = self.peer_of(key)
        self.machine.on_message(peer, KvWelcome("g2"), self.now)
        self.machine.on_message(peer, KvGrant(*key, 0, WINDOW), self.now)
        self.granted.add(key)
        self.machine.on_message(peer, KvCredit(*key, self.arrived.get(key, 0)), self.now)
        if key in self.first_tokens:
            self.machine.on_message(peer, KvDone(*key), self.now)

    def _say(self, peer: int, tree: Any) -> None:
        for word in decode_from_decode.words([frame_of(tree)]):
            self.machine.on_message(f"decode-{1 + peer % 3}", word, self.now)

    def _full(self, peer: int, is_full: bool) -> None:
        (self.outlet.full.add if is_full else self.outlet.full.discard)(f"decode-{peer % NUM_PEERS}")

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    # --- what must hold

    def check(self) -> None:
        self.pool.books.check_integrity(self.pool.tables.items())
        assert len(self.machine) == len(self.pool.tables) == len(self.opened) - len(self.ends)
        assert self.machine._peer_of.keys() == self.pool.tables.keys()
        assert set(self.machine._peers) == self.outlet.open
        assert len(self.machine._aborts) <= len(self.ends)
        assert len(self.machine._peers._lines._budget) <= MAX_NAMED + 1
        for transfer in self.machine._book:
            assert (transfer.first_token or 0) <= transfer.num_tokens, transfer
            if self.opened[transfer.key] % NUM_PEERS == HONEST:
                assert transfer.in_flight_bytes <= WINDOW, transfer

    def finish(self) -> None:
        """The honest worker's transfers are computed and taken over; the others are aborted. Nothing is left."""
        self.outlet.full.clear()
        for key in [key for key, index in self.opened.items() if index % NUM_PEERS == HONEST]:
            for _ in range(40):
                if key in self.ends:
                    break
                self.play(["compute", self.opened[key], 4])
                self.play(["answer", self.opened[key]])
            assert self.ends[key] in (TransferOutcome.DONE, TransferOutcome.ABORTED), (key, self.ends[key])
        for key in sorted(self.opened.keys() - self.ends.keys()):
            self.machine.apply(Abort(key, "the test is over", tell_peer=False), self.now)
        assert self.ends.keys() == self.opened.keys()
        self.pool.check_all_is_empty()
