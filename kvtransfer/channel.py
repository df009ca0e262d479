"""The channels between our processes. They move messages, and know nothing of requests, blocks or tensors.

    gateway   ControlServer (ROUTER, asyncio)  <----  ControlClient (DEALER)   each worker, one per gateway
    decode    KvListener    (ROUTER)           <----  KvDialer      (DEALER)   prefill, one per decode worker

A control message is one frame. A KV message is one frame, or three: header, K, V. Anything else is refused before it is
decoded. libzmq's own heartbeats notice a dead peer or a cut link; they say nothing about the application behind it, so
the protocol has beats of its own.

With `security` all of a channel is encrypted, the ends know each other by their keys, and a message is refused that
comes under the name of a worker whose key its sender has not.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from kvtransfer.complaints import Complaints
from kvtransfer.curve import GATEWAY_KEY, CurveKeys
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.kv_messages import (
    MAX_BODY_BYTES,
    DecodeToPrefill,
    PrefillToDecode,
    decode_from_decode,
    decode_from_prefill,
)
from kvtransfer.layout import KvBody
from kvtransfer.line import Dialling, Line
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    MAX_CONTROL_BYTES,
    GatewayToWorker,
    Refused,
    Role,
    WorkerToGateway,
    decode_from_gateway,
    decode_from_worker,
    encode,
)
from kvtransfer.sockets import Bounds, bind, endpoint_port, listening_router, receive_now, send_now
from kvtransfer.zap import ZapHandler

__all__ = ["ControlClient", "ControlServer", "KvDialer", "KvListener", "endpoint_port"]

logger = logging.getLogger(__name__)

CONTROL_HWM = 4096
"""Messages queued to one peer before a send fails. A step sends one message a gateway: minutes of silence."""
KV_HWM = 128
"""Messages, not bytes. The bound in bytes is each grant's window; this one holds where many transfers share a link, and
lets decode ask for all layers of a transfer at once."""
CONTROL_BOUNDS = Bounds(CONTROL_HWM, MAX_CONTROL_BYTES)
KV_BOUNDS = Bounds(KV_HWM, MAX_BODY_BYTES)


class ControlServer:
    """The gateway's end of the control plane (asyncio)."""

    def __init__(self, host: str, port: int, security: CurveKeys | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._security = security
        if security is not None:
            ZapHandler(self._context, security.admitted(GATEWAY_KEY))
        self._socket: zmq.asyncio.Socket = listening_router(self._context, CONTROL_BOUNDS, security)
        try:
            self.endpoint = bind(self._socket, host, port)
        except SettingsError:
            self.close()
            raise

    async def receive(self) -> tuple[str, WorkerToGateway | MessageError]:
        """The next message and the name its sender connected with, or what was wrong with the bytes or the name."""
        frames = await self._socket.recv_multipart(copy=False)
        name = frames[0].bytes.decode("utf-8", "replace")
        if self._security is not None and (fault := self._security.identity_fault(name, frames[0])):
            return name, fault
        return name, decode_from_worker.or_error([frame.buffer for frame in frames[1:]])

    def send(self, name: str, message: GatewayToWorker) -> bool:
        """Queues a message for whoever connected with this name; False if nobody is or the queue is full. Needs a
        running event loop.

        Tried once, never awaited: with NOBLOCK the future is done at once. It has to be the asyncio face that sends:
        a plain send on the same socket may swallow the wake-up of a `receive` that is waiting.
        """
        frames = [name.encode(), encode(message)]
        sent = asyncio.ensure_future(self._socket.send_multipart(frames, zmq.NOBLOCK))
        return sent.exception() is None

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Polled:
    """A context and a poller: what the worker's sockets have in common. For one thread only."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()

    def watch(self, mailbox: Mailbox[Any]) -> None:
        """Makes `poll` return when `mailbox` has something."""
        self._poller.register(mailbox.fileno(), zmq.POLLIN)

    def poll(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a message or a watched mailbox."""
        self._poller.poll(max(0, int(timeout * 1000)))


class ControlClient(_Polled):
    """A worker's end of the control plane: one DEALER a gateway. For one thread only."""

    def __init__(self, name: str, gateways: Sequence[str], security: CurveKeys | None = None) -> None:
        """Connects in the background, under `name`. Raises SettingsError for an address that cannot be dialled, and
        for want of the gateway's key."""
        super().__init__()
        self._lines: dict[str, Line] = {}
        self._complaints = Complaints()
        try:
            keys = None if security is None else (security, security.public_key_of(GATEWAY_KEY))
            for endpoint in gateways:
                dialling = Dialling(name, endpoint, CONTROL_BOUNDS, queue_offline=False, security=keys)
                self._lines[endpoint] = Line(self._context, self._poller, dialling)
        except SettingsError:
            self.close()
            raise

    def receive(self) -> list[tuple[str, GatewayToWorker | MessageError]]:
        """All messages at hand, with the gateway they come from."""
        received: list[tuple[str, GatewayToWorker | MessageError]] = []
        now = time.monotonic()
        for gateway, line in self._lines.items():
            self._tend(gateway, line, now)
            for frames in line.receive():
                received.append((gateway, decode_from_gateway.or_error([frame.buffer for frame in frames])))
        return received

    def send(self, gateway: str, message: WorkerToGateway) -> bool:
        """Queues a message; False if the queue to this gateway is full, or it is not connected."""
        return self._lines[gateway].send([encode(message)])

    def _tend(self, gateway: str, line: Line, now: float) -> None:
        reason = line.tend(now)
        if reason is not None and self._complaints.is_news(gateway, reason, now):
            logger.warning("gateway %s can't be connected to, trying on: %s", gateway, reason)
        if line.is_up:
            self._complaints.settle(gateway)
        line.redial_if_due(now)

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._context.term()


class KvDialer(_Polled):
    """Prefill's end of the KV links: one DEALER a decode worker. For one thread only."""

    def __init__(self, name: str, security: CurveKeys | None = None) -> None:
        super().__init__()
        self._name = name
        self._security = security
        self._lines: dict[str, Line] = {}
        self._full: set[str] = set()  # peers whose queue was full

    def dial(self, peer: str, endpoint: str) -> None:
        """Opens a link to `peer`; libzmq connects and reconnects behind it. Raises SettingsError for a bad endpoint,
        and for want of the peer's key."""
        assert peer not in self._lines, peer
        keys = None if self._security is None else (self._security, self._security.public_key_of(peer))
        dialling = Dialling(self._name, endpoint, KV_BOUNDS, queue_offline=True, security=keys)
        self._lines[peer] = Line(self._context, self._poller, dialling)

    def hang_up(self, peer: str) -> None:
        """Closes the link to `peer`."""
        self._full.discard(peer)
        self._lines.pop(peer).close(linger=0)

    def receive(self) -> list[tuple[str, DecodeToPrefill | MessageError]]:
        """All messages at hand, with the peer they come from. A link that can't be made says Refused by itself, and
        takes nothing from then on."""
        received: list[tuple[str, DecodeToPrefill | MessageError]] = []
        now = time.monotonic()
        for peer, line in self._lines.items():
            for frames in line.receive():
                received.append((peer, decode_from_decode.or_error([frame.buffer for frame in frames])))
            if (reason := line.tend(now)) is not None:
                received.append((peer, Refused(reason)))
        return received

    def send(self, peer: str, message: PrefillToDecode, body: KvBody | None = None) -> bool:
        """Queues a message, its bodies without a copy; False if the queue to this peer is full."""
        frames: list[bytes | memoryview] = [encode(message)]
        if body is not None:
            frames += [body.k, body.v]
        return self._lines[peer].send(frames) or self._note_full(peer)

    def has_room(self, peer: str) -> bool:
        """Whether a send to `peer` would be taken now."""
        return self._lines[peer].has_room() or self._note_full(peer)

    def poll(self, timeout: float) -> None:
        """Waits as above, and also for room at each peer whose queue was full since the last call."""
        super().poll(timeout)
        for peer in self._full:
            self._lines[peer].wake_for_room(False)
        self._full.clear()

    def _note_full(self, peer: str) -> bool:
        self._full.add(peer)
        self._lines[peer].wake_for_room(True)
        return False

    def close(self) -> None:
        for peer in list(self._lines):
            self.hang_up(peer)
        self._context.term()


class KvListener(_Polled):
    """Decode's end of the KV links. For one thread only."""

    def __init__(self, host: str, port: int, security: CurveKeys | None = None) -> None:
        super().__init__()
        self._security = security
        if security is not None:
            ZapHandler(self._context, security.admitted(GATEWAY_KEY, Role.DECODE.value))
        self._socket: zmq.Socket[bytes] = listening_router(self._context, KV_BOUNDS, security)
        try:
            self.endpoint = bind(self._socket, host, port)
        except SettingsError:
            self.close()
            raise
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self) -> tuple[bytes, PrefillToDecode | MessageError, KvBody | None] | None:
        """The next message with its sender's link name and its body, or None if there is none at hand."""
        frames = receive_now(self._socket)
        if frames is None:
            return None
        link = frames[0].bytes
        if self._security is not None:
            fault = self._security.identity_fault(link.decode("utf-8", "replace"), frames[0])
            if fault is not None:
                return link, fault, None
        if len(frames) not in (2, 4):
            return link, MessageError(f"{len(frames) - 1} frames, a KV message has 1 or 3"), None
        body = KvBody(frames[2].buffer, frames[3].buffer) if len(frames) == 4 else None
        return link, decode_from_prefill.or_error([frames[1].buffer]), body

    def send(self, link: bytes, message: DecodeToPrefill) -> bool:
        """Queues a message; False if the peer is gone or its queue is full."""
        return send_now(self._socket, [link, encode(message)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()
