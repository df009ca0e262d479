"""The receive machine with an engine that behaves and peers that need not.

Peer 0 is honest and speaks on a link of its own; whatever the others do, its transfers must arrive. A step is a list
that JSON can hold, so that a sequence which was interesting once is kept in `corpus/`:

    ["expect", KEY]                       the engine takes the request of key KEY in
    ["grant"], ["close", KEY]             it reserves for all that is offered; it gives one up
    ["next", KEY, changes, cut]           KEY's peer says what is due next, with fields changed and bodies cut
    ["say", LINK, tree, sizes]            somebody says something, with bodies of these sizes
    ["pass", SECONDS]                     time goes by
"""

from itertools import product
from typing import Any

import msgspec

from kvtransfer.codec import PROTOCOL_VERSION, encode
from kvtransfer.incoming import MAX_PARKED_OFFERS, MAX_REMEMBERED, KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.kv_messages import KvFirstToken, KvHeader, KvHello, KvOffer, decode_from_decode, decode_from_prefill
from kvtransfer.layout import KvBody
from kvtransfer.peers import MAX_PEERS
from kvtransfer.receive_machine import Close, Expect, Grant, ReceiveMachine, ReceiverLimits
from kvtransfer.worker_lines import MAX_NAMED
from tests.fuzz.hostile import frame_of, tree_of
from tests.kvtransfer.fake_pools import POISON, TOKEN_BYTES, HashPool, content
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

NUM_KEYS, NUM_PEERS = 6, 3
LEASE = 10.0
HONEST = 0
CHUNK = 3
"""Tokens in one frame of a peer that does as it should."""


def key_of(index: int) -> tuple[str, int]:
    return (f"r{index}", index % 2)


def link_of(peer: int) -> bytes:
    return f"prefill-{peer}/g1".encode()


class Due:
    """What one transfer's peer has to say next, if it does as it should."""

    def __init__(self, index: int) -> None:
        self.key, self.peer = key_of(index), index % NUM_PEERS
        self.num_tokens = 2 + 2 * index
        together = 1 + (index // NUM_PEERS) % LAYOUT.num_layers
        frames = [
            KvHeader(*self.key, layer, start, stop, 0, LAYOUT.num_kv_heads, LAYOUT.dtype, num_layers=together)
            for start, stop in ((at, min(at + CHUNK, self.num_tokens)) for at in range(0, self.num_tokens, CHUNK))
            for layer in range(0, LAYOUT.num_layers, together)
        ]
        self.left = [KvOffer(*self.key, self.num_tokens), *frames, KvFirstToken(*self.key, 7)]

    def bodies(self, header: KvHeader) -> list[bytes]:
        rows = list(product(header.layers, range(header.start, header.stop)))
        return [b"".join(content(self.key, layer, part, token) for layer, token in rows) for part in (0, 1)]


class GuardedPool(HashPool):
    """Refuses what the machine must never do with it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=16, block_size=4)
        self.num_tokens: dict = {}

    def splice(self, key, header, body) -> None:
        assert key in self.tables, f"{key} owns no blocks"
        assert 0 <= header.start < header.stop <= self.num_tokens[key], header
        assert len(body.k) == len(body.v) == header.num_rows * TOKEN_BYTES, header
        super().splice(key, header, body)

    def check_nothing_is_written_elsewhere(self) -> None:
        owned = {
            self._slot(key, token)
            for key, count in self.num_tokens.items()
            if key in self.tables
            for token in range(count)
        }
        stray = [place for place, value in self.slots.items() if value != POISON and place[2] not in owned]
        assert not stray, stray


class ReceiveWorld:
    """One receive machine, its engine, and whoever speaks to it."""

    def __init__(self) -> None:
        self.pool = GuardedPool()
        self.now = 100.0
        self.due = [Due(index) for index in range(NUM_KEYS)]
        self.expected: set = set()
        self.offered: list = []  # keys that the engine has to reserve for
        self.ends: dict = {}
        self.closed: set = set()
        self.honest_spoke_at = self.now
        self.machine = ReceiveMachine(
            (FINGERPRINT, LAYOUT), "g2", self.pool, ReceiverLimits(128, LEASE), self._send, self._report
        )
        for peer in range(NUM_PEERS):
            self._hello(peer)

    # --- what the machine does

    def _send(self, link, message) -> bool:
        assert decode_from_decode(encode(message)) == message, "the peer could not read this"
        return True

    def _report(self, event) -> None:
        assert event.key in self.expected, f"never expected: {event}"
        assert event.key not in self.ends, f"behind its end: {event}"
        if isinstance(event, KvOffered):
            assert event.key not in self.offered
            assert event.key not in self.pool.tables
            self.offered.append(event.key)
            return
        assert isinstance(event, ReceptionEnded)
        self.ends[event.key] = event.outcome
        if event.key in self.offered:
            self.offered.remove(event.key)
        if event.key in self.pool.tables:
            if event.outcome is ReceptionOutcome.ARRIVED:
                self._check_content(event.key)
            self.pool.free(event.key)

    def _check_content(self, key) -> None:
        """A liar's KV may be anything, but none of it may be missing."""
        is_honest = self._due_of(key).peer == HONEST
        for layer in range(LAYOUT.num_layers):
            for part in (0, 1):
                for token in range(self.pool.num_tokens[key]):
                    found = self.pool.read(key, layer, part, token)
                    assert found == content(key, layer, part, token) if is_honest else found != POISON, (key, token)

    def _due_of(self, key) -> Due:
        return next(due for due in self.due if due.key == key)

    # --- steps

    def play(self, step: list) -> None:
        name, *args = step
        getattr(self, f"_{name}")(*args)
        self.machine.sweep(self.now)
        self.check()

    def _hello(self, peer: int) -> None:
        hello = KvHello(PROTOCOL_VERSION, f"prefill-{peer}", "g1", FINGERPRINT, LAYOUT)
        self.machine.on_message(link_of(peer), hello, None, self.now)

    def _expect(self, index: int) -> None:
        due = self.due[index]
        if due.key in self.expected:
            return
        self.expected.add(due.key)
        self.pool.num_tokens[due.key] = due.num_tokens
        self.machine.apply(Expect(due.key, (f"prefill-{due.peer}", "g1"), due.num_tokens), self.now)

    def _grant(self) -> None:
        while self.offered:
            key = self.offered.pop(0)
            self.pool.allocate(key, self.pool.num_tokens[key])
            self.machine.apply(Grant(key, 0), self.now)

    def _close(self, index: int) -> None:
        self.closed.add(key_of(index))
        self.machine.apply(Close(key_of(index), "no longer wanted"), self.now)

    def _next(self, index: int, changes: dict[str, Any], cut: list[int]) -> None:
        due = self.due[index]
        if not due.left or due.key not in self.expected:
            return
        is_honest = due.peer == HONEST
        message = due.left[0]
        if isinstance(message, KvHeader) and due.key not in self.pool.tables:
            return  # not granted yet
        due.left.pop(0)
        bodies = due.bodies(message) if isinstance(message, KvHeader) else None
        tree = tree_of(message) | ({} if is_honest else changes)
        if bodies and not is_honest:
            bodies = [(body * 2)[: max(0, len(body) + extra)] for body, extra in zip(bodies, cut, strict=True)]
        self._speak(link_of(due.peer), tree, bodies)

    def _say(self, link: int, tree: Any, sizes: list[int] | None) -> None:
        """Never on the honest peer's link, and never under its name: links will be bound to keys."""
        if isinstance(tree, dict) and tree.get("worker_id") == f"prefill-{HONEST}":
            tree = {**tree, "worker_id": "prefill-1"}
        bodies = None if sizes is None else [b"\x5a" * size for size in sizes]
        liar = 1 + link % 4  # the last two have never introduced themselves
        if liar < NUM_PEERS and self.machine._peers.heard_on(link_of(liar), self.now) is None:
            self._hello(liar)  # it was thrown out for its last lie
        self._speak(link_of(liar), tree, bodies)

    def _speak(self, link: bytes, tree: Any, bodies: list[bytes] | None) -> None:
        if link == link_of(HONEST):
            if self.now - self.honest_spoke_at > LEASE:
                self._hello(HONEST)  # a link that was idle for so long is dialled anew
            self.honest_spoke_at = self.now
        *before, last = decode_from_prefill.words([frame_of(tree)])
        for word in before:
            self.machine.on_message(link, word, None, self.now)
        body = None if bodies is None else KvBody(*(memoryview(part) for part in bodies))
        self.machine.on_message(link, last, body, self.now)

    def _pass(self, seconds: float) -> None:
        """The honest peer keeps its transfers alive meanwhile."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for due in self.due:
                is_open = due.left and not isinstance(due.left[0], KvOffer) and due.key not in self.ends
                if due.peer == HONEST and is_open:
                    self._speak(link_of(HONEST), tree_of(KvOffer(*due.key, due.num_tokens)), None)
            self.machine.sweep(self.now)

    # --- what must hold

    def check(self) -> None:
        self.pool.check_nothing_is_written_elsewhere()
        self.pool.books.check_integrity(self.pool.tables.items())
        assert len(self.machine) == len(self.expected - self.ends.keys())
        book = self.machine._book
        assert book.num_parked <= MAX_PARKED_OFFERS
        assert len(book._ended) <= MAX_REMEMBERED
        assert len(self.machine._peers) <= MAX_PEERS
        for lines in (self.machine._lines, self.machine._loss_lines):
            assert len(lines._budget) <= MAX_NAMED + 1
        assert self.machine._ends._first_frame_at.keys() <= self.pool.tables.keys()

    def finish(self) -> None:
        """The honest transfers go on to their end; the others are closed. Then nothing is left."""
        for index, due in enumerate(self.due):
            while due.peer == HONEST and due.left and due.key in self.expected - self.ends.keys():
                num_left = len(due.left)
                self.play(["grant"])
                self.play(["next", index, {}, [0, 0]])
                assert len(due.left) < num_left, f"{due.key} was never granted"
        for key in sorted(self.expected - self.ends.keys()):
            self.machine.apply(Close(key, "the test is over"), self.now)
        assert self.ends.keys() == self.expected
        honest = {due.key for due in self.due if due.peer == HONEST} & self.expected - self.closed
        assert {self.ends[key] for key in honest} <= {ReceptionOutcome.ARRIVED}
        self.pool.check_all_is_empty()
        assert len(self.machine) == 0


def sequence_from(text: bytes) -> list[list]:
    return msgspec.json.decode(text)
