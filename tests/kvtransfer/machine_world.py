"""A send machine and a receive machine on a wire of the test's own: no thread, no socket, and the clock is a number.

The wire keeps the order of messages, as a link does; what it does to each is the test's choice (`fault`). Pools hold
hashes, so what is spliced is checked token by token.
"""

from collections import deque
from collections.abc import Callable
from itertools import product

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.kv_messages import KvHello
from kvtransfer.layout import KvBody
from kvtransfer.messages import DecodeTarget
from kvtransfer.receive_commands import Expect, Grant, ReceiverLimits
from kvtransfer.receive_machine import ReceiveMachine
from kvtransfer.send_commands import FirstToken, Open, Ready, SenderTiming
from kvtransfer.send_machine import SendMachine
from tests.kvtransfer.fake_pools import HashPool, content
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

KEEPALIVE, LEASE, TICK = 1.0, 4.0, 0.05
PEER, TARGET = ("prefill-0", "g1"), DecodeTarget("decode-0", "g2", "tcp://127.0.0.1:9")
Sent = tuple[object, KvBody | None]
Fault = Callable[[object, KvBody | None], list[Sent]]


def no_fault(message, body) -> list[Sent]:
    return [(message, body)]


class Outlet:
    """In place of the sockets: `wire` is what is on its way to decode, of one link."""

    def __init__(self, fault: Fault) -> None:
        self.wire: deque[Sent] = deque()
        self.sent: list[object] = []
        self.fault = fault
        self.is_full = False
        self.most_kv_bytes = 0  # on the way at once

    def dial(self, peer, endpoint) -> None:
        return

    def hang_up(self, peer) -> None:
        self.wire.clear()

    def has_room(self, peer) -> bool:
        return not self.is_full

    def send(self, peer, message, body=None) -> bool:
        self.sent.append(message)
        self.wire.extend(self.fault(message, body))
        on_the_way = sum(len(body.k) + len(body.v) for _, body in self.wire if body is not None)
        self.most_kv_bytes = max(self.most_kv_bytes, on_the_way)
        return True


class Sender:
    """One prefill process: the KV heads [heads[0], heads[1]) of its worker."""

    def __init__(self, fault: Fault, heads=None, patience=10 * LEASE, keepalive=KEEPALIVE, **options) -> None:
        """`patience`: its own lease, far away unless a test is about it, so that what ends has ended on decode."""
        about = {"fingerprint": FINGERPRINT, "layout": LAYOUT, "protocol": PROTOCOL_VERSION}
        self.heads = heads or (0, LAYOUT.num_kv_heads)
        start, stop = self.heads
        self.pool = HashPool(64, 4)
        self.outlet = Outlet(fault)
        self.ends: list = []
        self.link = f"{PEER[0]}/{PEER[1]}/{start}-{stop}".encode()
        hello = KvHello(worker_id=PEER[0], generation=PEER[1], head_start=start, head_stop=stop, **about)
        self.machine = SendMachine(
            hello, self, self.outlet, self.ends.append, SenderTiming(keepalive, patience), **options
        )

    def gather(self, key, piece) -> KvBody:
        whole = self.pool.gather(key, piece)
        return KvBody(*(_some_heads(part, self.heads) for part in (whole.k, whole.v)))

    def send_all(self, key, num_tokens, now=0.0, token_id=7) -> None:
        self.open(key, num_tokens, now)
        self.compute(key, range(num_tokens), now)
        self.machine.apply(FirstToken(key, token_id), now)

    def open(self, key, num_tokens, now=0.0) -> None:
        self.pool.allocate(key, num_tokens)
        self.machine.apply(Open(key, TARGET, num_tokens), now)

    def compute(self, key, tokens: range, now=0.0) -> None:
        for layer in range(LAYOUT.num_layers):
            for part in (0, 1):
                for token in tokens:
                    self.pool.write(key, layer, part, token, content(key, layer, part, token))
            self.machine.apply(Ready(layer, ((key, tokens.stop),)), now)


class MachineWorld:
    """Senders of one prefill worker, and one decode worker. `back_fault` is what happens to words of decode."""

    def __init__(self, *senders: Sender, window=1 << 20, back_fault: Fault = no_fault) -> None:
        self.senders = senders
        self.pool = HashPool(64, 16)
        self.now = 0.0
        self.back: deque = deque()
        self.said: list = []
        self.back_fault = back_fault
        self.ends: list[ReceptionEnded] = []
        self.offered: list = []
        self.first_token: dict = {}
        limits = ReceiverLimits(window, LEASE)
        self.machine = ReceiveMachine((FINGERPRINT, LAYOUT), "g2", self, limits, self._say, self._on_event)

    def splice(self, key, header, body) -> None:
        """Into the heads that the frame brings; the others keep what they have."""
        start, stop = header.head_start * HEAD_BYTES, header.head_stop * HEAD_BYTES
        size = stop - start
        for part, view in enumerate((body.k, body.v)):
            for index, (layer, token) in enumerate(product(header.layers, range(header.start, header.stop))):
                value = bytearray(self.pool.read(key, layer, part, token))
                value[start:stop] = view[index * size : (index + 1) * size]
                self.pool.write(key, layer, part, token, bytes(value))

    def finish(self, key) -> None:
        self.pool.finish(key)

    def expect(self, key, num_tokens, first_token=0) -> None:
        self.first_token[key] = (first_token, num_tokens)
        self.machine.apply(Expect(key, PEER, num_tokens), self.now)

    def _on_event(self, event) -> None:
        if isinstance(event, KvOffered):
            self.offered.append(event.key)
        else:
            self.ends.append(event)

    def _say(self, link, message) -> bool:
        self.said.append(message)
        self.back.extend((link, word) for word, _ in self.back_fault(message, None))
        return True

    def turn(self) -> None:
        """Each side gets what is on its way, and says what it has to say."""
        for sender in self.senders:
            sender.machine.ship(self.now)
            for _ in range(4):  # a few at a time: the two sides talk past each other, as they do in life
                if sender.outlet.wire:
                    self.machine.on_message(sender.link, *sender.outlet.wire.popleft(), self.now)
        for key in self.offered:
            self.pool.allocate(key, self.first_token[key][1])
            self.machine.apply(Grant(key, self.first_token[key][0]), self.now)
        self.offered.clear()
        while self.back:
            link, message = self.back.popleft()
            next(sender for sender in self.senders if sender.link == link).machine.on_message(
                TARGET.worker_id, message, self.now
            )
        self.machine.sweep(self.now)
        self.now += TICK

    def run(self, seconds: float = 200.0) -> None:
        """Until both sides have nothing left to do. `seconds` of the world's own time."""
        deadline = self.now + seconds
        while len(self.machine) or any(len(sender.machine) for sender in self.senders):
            assert self.now < deadline, "waited in vain"
            self.turn()

    def check_arrived(self, key) -> None:
        """The one end of `key` is that everything is in the pool, token by token."""
        (end,) = self.ends
        assert (end.outcome, end.first_token_id, end.reason) == (ReceptionOutcome.ARRIVED, 7, "")
        for layer in range(LAYOUT.num_layers):
            for part in (0, 1):
                for token in range(*self.first_token[key]):
                    assert self.pool.read(key, layer, part, token) == content(key, layer, part, token)


HEAD_BYTES = 16
"""Of K or V of one token and head in one layer: LAYOUT's 4 float32."""


def _some_heads(part: memoryview, heads) -> memoryview:
    size, (start, stop) = LAYOUT.num_kv_heads * HEAD_BYTES, heads
    tokens = [part[at : at + size] for at in range(0, len(part), size)]
    return memoryview(b"".join(token[start * HEAD_BYTES : stop * HEAD_BYTES] for token in tokens))
