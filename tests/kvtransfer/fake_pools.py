"""Two sides of a hand-over with real threads and sockets, over pools that hold hashes instead of KV.

A token's K and V are digests of (request, attempt, layer, token, part), so that a swapped, stale or misplaced token is
seen. Freed blocks are poisoned, so that a read or a write after the free is seen as well.
"""

import hashlib
import time
from collections import Counter
from itertools import product

from engine.block_pool import BlockPool
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.frames import PLAIN
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.kv_channel import KvListener
from kvtransfer.kv_messages import KvHello
from kvtransfer.layout import KvBody
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.receiver import KvReceiver
from kvtransfer.send_commands import SenderTiming
from kvtransfer.sender import KvSender
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

TOKEN_BYTES = 32  # of K or V in one layer: LAYOUT's 2 heads of 4 float32
POISON = b"\xee" * TOKEN_BYTES
PATIENCE_S = 15.0


def content(key, layer: int, part: int, token: int) -> bytes:
    return hashlib.sha256(repr((*key, layer, part, token)).encode()).digest()


def wait_until(condition, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


class HashPool:
    """A paged pool; KvSource and KvSink in one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.books = BlockPool(num_blocks, block_size)
        self.tables: dict = {}
        self.slots = {
            (layer, part, slot): POISON
            for layer in range(LAYOUT.num_layers)
            for part in (0, 1)
            for slot in range(num_blocks * block_size)
        }
        self.finished: list = []

    def allocate(self, key, num_tokens: int) -> None:
        self.tables[key] = self.books.allocate(num_tokens, key)

    def free(self, key) -> None:
        block_ids = self.tables.pop(key)
        size = self.books.block_size
        for layer, part, slot in self.slots:
            if slot // size in block_ids:
                self.slots[layer, part, slot] = POISON
        self.books.free(block_ids, key)

    def write(self, key, layer: int, part: int, token: int, value: bytes) -> None:
        self.slots[layer, part, self._slot(key, token)] = value

    def read(self, key, layer: int, part: int, token: int) -> bytes:
        return self.slots[layer, part, self._slot(key, token)]

    def gather(self, key, piece) -> KvBody:
        rows = list(product(range(piece.layer, piece.layer + piece.num_layers), range(piece.start, piece.stop)))
        k, v = (b"".join(self.read(key, layer, part, token) for layer, token in rows) for part in (0, 1))
        return KvBody(memoryview(k), memoryview(v))

    def splice(self, key, header, body) -> None:
        for part, view in enumerate((body.k, body.v)):
            for index, (layer, token) in enumerate(product(header.layers, range(header.start, header.stop))):
                value = bytes(view[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES])
                self.write(key, layer, part, token, value)

    def finish(self, key) -> None:
        self.finished.append(key)

    def check_all_is_empty(self) -> None:
        self.books.check_integrity(self.tables.items())
        assert not self.tables
        assert set(self.slots.values()) == {POISON}, "somebody wrote to a block that nobody owns"

    def _slot(self, key, token: int) -> int:
        size = self.books.block_size
        return self.tables[key][token // size] * size + token % size


class Side:
    """What both ends share: events are taken in by `collect`, each end once, and blocks are freed only then."""

    def __init__(self, pool: HashPool) -> None:
        self.pool = pool
        self.events: Mailbox = Mailbox()
        self.ends: dict = {}
        self.num_ends: Counter = Counter()

    def collect(self) -> None:
        for event in self.events.drain():
            self.num_ends[event.key] += 1
            self.ends[event.key] = event
            self.on_end(event)

    def on_end(self, event) -> None:
        self.pool.free(event.key)

    def end_of(self, key, seconds: float = PATIENCE_S):
        def has_ended() -> bool:
            self.collect()
            return key in self.ends

        wait_until(has_ended, seconds)
        return self.ends[key]

    def check_at_rest(self) -> None:
        """All ended exactly once, and nothing is left."""
        self.collect()
        assert set(self.num_ends.values()) <= {1}, self.num_ends
        self.pool.check_all_is_empty()


class PrefillSide(Side):
    def __init__(
        self,
        block_size=4,
        keepalive=5.0,
        lease=60.0,
        name="prefill-0",
        generation="g1",
        security=None,
        options=PLAIN,
        link=None,
        num_blocks=64,
        **identity,
    ) -> None:
        super().__init__(HashPool(num_blocks, block_size))
        about = {"fingerprint": FINGERPRINT, "layout": LAYOUT, "protocol": PROTOCOL_VERSION} | identity
        self.peer = (name, generation)
        self.hello = KvHello(worker_id=name, generation=generation, **about)
        self.sender = KvSender(
            self.hello, self.pool, self.events, SenderTiming(keepalive, lease), security, options, link
        )
        self.computed: dict = {}
        self.sender.start()

    def open(self, key, target: DecodeTarget, num_tokens: int) -> None:
        self.pool.allocate(key, num_tokens)
        self.computed[key] = 0
        self.sender.open(key, target, num_tokens)

    def compute(self, key, stop: int) -> None:
        """Tokens up to `stop`, layer after layer."""
        for layer in range(LAYOUT.num_layers):
            for part in (0, 1):
                for token in range(self.computed[key], stop):
                    self.pool.write(key, layer, part, token, content(key, layer, part, token))
            self.sender.ready(layer, [(key, stop)])
        self.computed[key] = stop

    def send_all(self, key, target: DecodeTarget, num_tokens: int, first_token: int = 7) -> None:
        self.open(key, target, num_tokens)
        self.compute(key, num_tokens)
        self.sender.first_token(key, first_token)

    def stop(self) -> None:
        self.sender.stop()
        assert not self.sender.is_alive()


class GrantingMailbox(Mailbox):
    """Grants what is offered right away, in place of an engine that would reserve blocks first."""

    def __init__(self, grant) -> None:
        super().__init__()
        self._grant = grant

    def put_all(self, items) -> None:
        for item in items:
            if isinstance(item, KvOffered):
                self._grant(item.key)
            else:
                super().put_all([item])


class DecodeSide(Side):
    def __init__(
        self,
        block_size=16,
        window=1 << 20,
        lease=30.0,
        generation="g2",
        port=0,
        listener_type=KvListener,
        num_blocks=32,
    ) -> None:
        super().__init__(HashPool(num_blocks, block_size))
        self.listener = listener_type("127.0.0.1", port)
        self.target = DecodeTarget("decode-0", generation, self.listener.endpoint)
        self.arrived: dict = {}
        self.events.close()
        self.events = GrantingMailbox(lambda key: self.receiver.grant(key, self.arrived[key].start))
        self.receiver = KvReceiver(
            self.listener,
            (FINGERPRINT, LAYOUT),
            generation,
            self.pool,
            ReceiverLimits(window, lease),
            self.events,
        )
        self.receiver.start()

    def expect(self, key, peer, num_tokens: int, first_token: int = 0) -> None:
        self.pool.allocate(key, num_tokens)
        self.arrived[key] = range(first_token, num_tokens)
        self.receiver.expect(key, peer, num_tokens)

    def on_end(self, event: TransferEnded | ReceptionEnded) -> None:
        if event.outcome is ReceptionOutcome.ARRIVED:
            assert event.key in self.pool.finished
            for layer in range(LAYOUT.num_layers):
                for part in (0, 1):
                    for token in self.arrived[event.key]:
                        found = self.pool.read(event.key, layer, part, token)
                        assert found == content(event.key, layer, part, token), (event.key, layer, part, token)
        super().on_end(event)

    def stop(self) -> None:
        self.receiver.stop()
        assert not self.receiver.is_alive()
