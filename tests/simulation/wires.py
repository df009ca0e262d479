"""The faces of `kvtransfer.channel` and `kvtransfer.kv_channel` over the simulated network. Bytes are really encoded
and decoded.

Each tells its `watch` of what goes in and out, so that invariants can be checked on the wire.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvtransfer.codec import RequestKey, encode
from kvtransfer.errors import MessageError
from kvtransfer.kv_messages import KvFirstToken, KvHeader, KvHello, KvOffer, decode_from_decode, decode_from_prefill
from kvtransfer.layout import KvBody
from kvtransfer.messages import Refused, decode_from_gateway, decode_from_worker
from kvtransfer.unsaid import UnsaidWords
from tests.simulation.network import Network
from tests.simulation.sockets import Dialer, Listener

Watch = Callable[[str, Any], None]
"""Is told (peer, message)."""

CONTROL_HWM = 4096
MESSAGES_AT_ONCE = 256


def ignore(peer: str, message: Any) -> None: ...


class SimControlWire:
    """Stands for `ControlClient`, a worker's end of the control plane."""

    def __init__(
        self, network: Network, host: str, name: str, gateways: Sequence[str], wake: Callable[[], None]
    ) -> None:
        self.on_send: Watch = ignore
        self.on_receive: Watch = ignore
        self._dialers = {
            endpoint: Dialer(network, host, name, endpoint, hwm=CONTROL_HWM, queues_offline=False, wake=wake)
            for endpoint in gateways
        }

    def receive(self) -> list[tuple[str, Any]]:
        received = []
        for gateway, dialer in self._dialers.items():
            num_taken = 0
            while num_taken < MESSAGES_AT_ONCE and (frames := dialer.receive()) is not None:
                message = decode_from_gateway.or_error(frames)
                self.on_receive(gateway, message)
                received.append((gateway, message))
                num_taken += 1
        return received

    def send(self, gateway: str, message: Any) -> bool:
        is_sent = self._dialers[gateway].send([encode(message)])
        if is_sent:
            self.on_send(gateway, message)
        return is_sent

    def close(self) -> None:
        for dialer in self._dialers.values():
            dialer.close()


class SimControlServer:
    """Stands for `ControlServer`, the gateway's end."""

    def __init__(self, network: Network, host: str, endpoint: str, loop: asyncio.AbstractEventLoop) -> None:
        self.on_send: Watch = ignore
        self.on_receive: Watch = ignore
        self._listener = Listener(network, host, endpoint, CONTROL_HWM, self._wake)
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> tuple[str, Any]:
        while (received := self._listener.receive()) is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        name, frames = received
        message = decode_from_worker.or_error(frames)
        self.on_receive(name, message)
        return name, message

    def send(self, name: str, message: Any) -> bool:
        is_sent = self._listener.send(name, [encode(message)])
        if is_sent:
            self.on_send(name, message)
        return is_sent

    def close(self) -> None:
        self._listener.close()


class SimKvDialer:
    """Stands for `KvDialer`, prefill's end of the KV links."""

    def __init__(self, network: Network, host: str, name: str, hwm: int, wake: Callable[[], None]) -> None:
        self._refused: set[Dialer] = set()
        self._network = network
        self._host = host
        self._name = name
        self._hwm = hwm
        self._wake = wake
        self._dialers: dict[str, Dialer] = {}
        self._unsaid = UnsaidWords(lambda peer, frame: self._dialers[peer].send([frame]))

    def dial(self, peer: str, endpoint: str) -> None:
        assert peer not in self._dialers, peer
        self._dialers[peer] = Dialer(
            self._network, self._host, self._name, endpoint, hwm=self._hwm, queues_offline=True, wake=self._wake
        )

    def hang_up(self, peer: str) -> None:
        self._unsaid.forget(peer)
        self._dialers.pop(peer).close()

    def send(self, peer: str, message: Any, body: KvBody | None = None) -> bool:
        if body is None and not isinstance(message, KvHello):
            return self.has_room(peer) and self._unsaid.add(peer, encode(message))
        self._unsaid.say_all()
        frames = [encode(message)] + ([] if body is None else [bytes(body.k), bytes(body.v)])
        return self._unsaid.say(peer) and self._dialers[peer].send(frames)

    def end_turn(self) -> None:
        self._unsaid.say_all()

    def has_room(self, peer: str) -> bool:
        return self._dialers[peer].has_room

    def receive(self) -> list[tuple[str, Any]]:
        received = []
        for peer, dialer in self._dialers.items():
            while (frames := dialer.receive()) is not None:
                words = decode_from_decode.words(frames)
                received += [(peer, word) for word in words]
                if any(isinstance(word, Refused) for word in words):
                    self._refused.add(dialer)
        return received

    @property
    def refused(self) -> list[str]:
        """Peers that have refused the link which is there to them now."""
        return [peer for peer, dialer in self._dialers.items() if dialer in self._refused]

    def close(self) -> None:
        for peer in list(self._dialers):
            self.hang_up(peer)


class SimKvListener:
    """Stands for `KvListener`, decode's end of the KV links. `passed_bytes`: of each transfer, how much KV is on its
    way no more, arrived or lost; a link keeps the order, so what has come tells. `received_bytes`: what has arrived."""

    def __init__(self, network: Network, host: str, endpoint: str, hwm: int, wake: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.on_send: Watch = ignore
        self.passed_bytes: dict[RequestKey, int] = {}
        self.received_bytes: Counter[RequestKey] = Counter()
        self._listener = Listener(network, host, endpoint, hwm, wake)
        self._unsaid = UnsaidWords(self._send_or_lose)

    def _send_or_lose(self, link: bytes, frame: bytes) -> bool:
        self._listener.send(link.decode(), [frame])
        return True

    def receive(self) -> list[tuple[bytes, Any, KvBody | None]]:
        received = self._listener.receive()
        if received is None:
            return []
        name, frames = received
        if len(frames) not in (1, 3):
            return [(name.encode(), MessageError(f"{len(frames)} frames, a KV message has 1 or 3"), None)]
        body = KvBody(memoryview(frames[1]), memoryview(frames[2])) if len(frames) == 3 else None
        words = decode_from_prefill.words([frames[0]])
        for word in words:
            self._note_passed(word, body)
        return [(name.encode(), word, body) for word in words]

    def _note_passed(self, message: Any, body: KvBody | None) -> None:
        if isinstance(message, KvHeader | KvFirstToken | KvOffer):
            key, num_bytes = (message.request_id, message.attempt), 0 if body is None else len(body.k) + len(body.v)
            self.received_bytes[key] += num_bytes
            self.passed_bytes[key] = max(self.passed_bytes.get(key, 0), message.sent_bytes + num_bytes)

    @property
    def has_unread(self) -> bool:
        return bool(self._listener.inbox)

    def send(self, link: bytes, message: Any) -> None:
        self._unsaid.add(link, encode(message))
        self.on_send(link.decode(), message)

    def end_turn(self) -> None:
        self._unsaid.say_all()

    def close(self) -> None:
        self._listener.close()
