"""The sockets: the only file that knows pyzmq. Moves frames; knows nothing of requests, blocks or tensors.

    gateway   ControlServer (ROUTER, asyncio)  <----  ControlClient (DEALER)   each worker, one per gateway
    decode    KvListener    (ROUTER)           <----  KvDialer      (DEALER)   prefill, one per decode worker

A control message is one frame. A KV message is one frame, or three: header, K, V. Anything else is refused before it is
decoded. libzmq's own heartbeats notice a dead peer or a cut link; they say nothing about the application behind it, so
the protocol has beats of its own.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from kvtransfer.addresses import check_endpoint
from kvtransfer.addresses import endpoint as endpoint_of
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.layout import KvBody
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    DecodeToPrefill,
    GatewayToWorker,
    PrefillToDecode,
    WorkerToGateway,
    decode_from_decode,
    decode_from_gateway,
    decode_from_prefill,
    decode_from_worker,
    encode,
)

CONTROL_HWM = 4096
"""Messages queued to one peer before a send fails. A step sends one message a gateway: minutes of silence."""
KV_HWM = 256
"""Messages, not bytes: the bound in bytes is the grant's window."""

_Frames = list[zmq.Frame]


def configure(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", *, hwm: int, max_frame: int) -> None:
    """Sets every option whose default would hang, leak or reconnect too eagerly."""
    socket.setsockopt(zmq.LINGER, 200)  # ms; default: close() waits for ever
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)  # default: unlimited
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)  # ms; default 30 s for a peer that never speaks
    socket.setsockopt(zmq.HEARTBEAT_IVL, 500)  # ms; default: off, a cut link is never noticed
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)  # default: no back-off
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def configure_router(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    """A ROUTER that says when it can't deliver, and lets a reconnecting peer take over its own name."""
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # default: messages for unknown peers vanish
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # default: a restarted peer is ignored until the old link dies


def bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", host: str, port: int) -> str:
    """Binds to host:port (0: any free port) and returns the endpoint. Raises SettingsError if it can't be had."""
    try:
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(endpoint_of(host, port or "*"))
    except zmq.ZMQError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def endpoint_port(endpoint: str) -> int:
    """Port of a 'tcp://host:port' endpoint."""
    return int(endpoint.rsplit(":", 1)[1])


class ControlServer:
    """The gateway's end of the control plane (asyncio)."""

    def __init__(self, host: str, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, hwm=CONTROL_HWM, max_frame=MAX_CONTROL_BYTES)
        configure_router(self._socket)
        try:
            self.endpoint = bind(self._socket, host, port)
        except SettingsError:
            self.close()
            raise

    async def receive(self) -> tuple[str, WorkerToGateway | MessageError]:
        """The next message and the name its sender connected with, or what was wrong with the bytes."""
        frames = await self._socket.recv_multipart(copy=False)
        name = frames[0].bytes.decode("utf-8", "replace")
        return name, decode_from_worker.or_error([frame.buffer for frame in frames[1:]])

    def send(self, worker_id: str, message: GatewayToWorker) -> bool:
        """Queues a message; False if the worker is not connected or its queue is full. Needs a running event loop.

        Tried once, never awaited: with NOBLOCK the future is done at once. It has to be the asyncio face that sends:
        a plain send on the same socket may swallow the wake-up of a `receive` that is waiting.
        """
        frames = [worker_id.encode(), encode(message)]
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

    def __init__(self, worker_id: str, gateways: Sequence[str]) -> None:
        """Connects in the background. Raises SettingsError for an address that cannot be dialled."""
        super().__init__()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        try:
            for endpoint in gateways:
                self._sockets[endpoint] = self._dial(worker_id, endpoint)
        except SettingsError:
            self.close()
            raise

    def _dial(self, worker_id: str, endpoint: str) -> "zmq.Socket[bytes]":
        socket = _dealer(
            self._context, worker_id, endpoint, hwm=CONTROL_HWM, max_frame=MAX_CONTROL_BYTES, queue_offline=False
        )
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def receive(self) -> list[tuple[str, GatewayToWorker | MessageError]]:
        """All messages at hand, with the gateway they come from."""
        received: list[tuple[str, GatewayToWorker | MessageError]] = []
        for gateway, socket in self._sockets.items():
            for frames in _frames_at_hand(socket):
                received.append((gateway, decode_from_gateway.or_error([frame.buffer for frame in frames])))
        return received

    def send(self, gateway: str, message: WorkerToGateway) -> bool:
        """Queues a message; False if the queue to this gateway is full."""
        return _send_now(self._sockets[gateway], [encode(message)])

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._context.term()


class KvDialer(_Polled):
    """Prefill's end of the KV links: one DEALER a decode worker. For one thread only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._full: set[str] = set()  # peers whose queue was full

    def dial(self, peer: str, endpoint: str) -> None:
        """Opens a link to `peer`; libzmq connects and reconnects behind it. Raises SettingsError for a bad endpoint."""
        assert peer not in self._sockets, peer
        socket = _dealer(self._context, self._name, endpoint, hwm=KV_HWM, max_frame=MAX_BODY_BYTES, queue_offline=True)
        self._poller.register(socket, zmq.POLLIN)
        self._sockets[peer] = socket

    def hang_up(self, peer: str) -> None:
        """Closes the link to `peer`."""
        socket = self._sockets.pop(peer)
        self._full.discard(peer)
        self._poller.unregister(socket)
        socket.close(linger=0)

    def receive(self) -> list[tuple[str, DecodeToPrefill | MessageError]]:
        """All messages at hand, with the peer they come from."""
        received: list[tuple[str, DecodeToPrefill | MessageError]] = []
        for peer, socket in self._sockets.items():
            for frames in _frames_at_hand(socket):
                received.append((peer, decode_from_decode.or_error([frame.buffer for frame in frames])))
        return received

    def send(self, peer: str, message: PrefillToDecode, body: KvBody | None = None) -> bool:
        """Queues a message, its bodies without a copy; False if the queue to this peer is full."""
        frames: list[bytes | memoryview] = [encode(message)]
        if body is not None:
            frames += [body.k, body.v]
        return _send_now(self._sockets[peer], frames) or self._note_full(peer)

    def has_room(self, peer: str) -> bool:
        """Whether a send to `peer` would be taken now."""
        return bool(self._sockets[peer].poll(0, zmq.POLLOUT)) or self._note_full(peer)

    def poll(self, timeout: float) -> None:
        """Waits as above, and also for room at each peer whose queue was full since the last call."""
        super().poll(timeout)
        for peer in self._full:
            self._poller.modify(self._sockets[peer], zmq.POLLIN)
        self._full.clear()

    def _note_full(self, peer: str) -> bool:
        self._full.add(peer)
        self._poller.modify(self._sockets[peer], zmq.POLLIN | zmq.POLLOUT)
        return False

    def close(self) -> None:
        for peer in list(self._sockets):
            self.hang_up(peer)
        self._context.term()


class KvListener(_Polled):
    """Decode's end of the KV links. For one thread only."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, hwm=KV_HWM, max_frame=MAX_BODY_BYTES)
        configure_router(self._socket)
        try:
            self.endpoint = bind(self._socket, host, port)
        except SettingsError:
            self.close()
            raise
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self) -> tuple[bytes, PrefillToDecode | MessageError, KvBody | None] | None:
        """The next message with its sender's link name and its body, or None if there is none at hand."""
        frames = _receive_now(self._socket)
        if frames is None:
            return None
        link = frames[0].bytes
        if len(frames) not in (2, 4):
            return link, MessageError(f"{len(frames) - 1} frames, a KV message has 1 or 3"), None
        body = KvBody(frames[2].buffer, frames[3].buffer) if len(frames) == 4 else None
        return link, decode_from_prefill.or_error([frames[1].buffer]), body

    def send(self, link: bytes, message: DecodeToPrefill) -> bool:
        """Queues a message; False if the peer is gone or its queue is full."""
        return _send_now(self._socket, [link, encode(message)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    name: str,
    endpoint: str,
    *,
    hwm: int,
    max_frame: int,
    queue_offline: bool,
) -> "zmq.Socket[bytes]":
    """A DEALER that connects in the background. Without `queue_offline`, sends fail while there is no connection.

    Raises SettingsError for an endpoint that libzmq could not dial, or would try to for ever.
    """
    check_endpoint(f"endpoint {endpoint!r}", endpoint)
    socket = context.socket(zmq.DEALER)
    configure(socket, hwm=hwm, max_frame=max_frame)
    socket.setsockopt_string(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.IMMEDIATE, 0 if queue_offline else 1)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()  # an open socket would keep the context from ending
        raise SettingsError(f"cannot connect to {endpoint!r}: {error.strerror}") from error
    return socket


def _receive_now(socket: "zmq.Socket[bytes]") -> _Frames | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def _frames_at_hand(socket: "zmq.Socket[bytes]", limit: int = 256) -> list[_Frames]:
    """Up to `limit` messages, so that one busy peer can't keep the caller from the others."""
    messages: list[_Frames] = []
    while len(messages) < limit and (frames := _receive_now(socket)) is not None:
        messages.append(frames)
    return messages


def _send_now(socket: "zmq.Socket[bytes]", frames: Sequence[bytes | memoryview]) -> bool:
    with contextlib.suppress(zmq.ZMQError):
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        return True
    return False
