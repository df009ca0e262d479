"""Sockets as all of ours are set up: every option whose default would hang, leak, or let anybody in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from kvtransfer.addresses import endpoint as endpoint_of
from kvtransfer.curve import OVERHEAD_BYTES, CurveKeys, be_server
from kvtransfer.errors import SettingsError
from kvtransfer.mailbox import Mailbox

Frames = list[zmq.Frame]

# Plain numbers: pyzmq's flags are enums, and to join two of them takes longer than to send a small frame.
_NOW: Final = int(zmq.NOBLOCK)
_NOW_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_IN: Final = int(zmq.POLLIN)
_OUT: Final = int(zmq.POLLOUT)
_MIN_BORROWED: Final = zmq.COPY_THRESHOLD
"""Bytes of a frame from which on not to copy it costs less than to."""


@dataclass(frozen=True)
class Bounds:
    """Messages queued to one peer, and from it; bytes of one frame."""

    hwm: int
    max_frame: int
    receive_hwm: int


def configure(socket: "zmq.Socket[Any]", bounds: Bounds) -> None:
    """Sets every option whose default would hang, leak or reconnect too eagerly."""
    socket.setsockopt(zmq.LINGER, 200)  # ms; default: close() waits for ever
    socket.setsockopt(zmq.SNDHWM, bounds.hwm)
    socket.setsockopt(zmq.RCVHWM, bounds.receive_hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, bounds.max_frame)  # default: unlimited
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)  # ms; default 30 s for a peer that never speaks
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)  # default: no back-off
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def beat(socket: "zmq.Socket[Any]") -> None:
    """For a socket that dials: libzmq asks the other side whether it is there, and with the TTL both of them give the
    connection up if nothing comes any more. By default a cut link is never noticed.

    One that listens must not ask. libzmq 4.3.5 aborts the process ("Assertion failed: !_io_error") if a question falls
    due on a connection that the other side has closed while its messages filled the queue.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, 500)  # ms, as below
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2_000)


def listening_router(context: "zmq.Context[Any]", bounds: Bounds, security: CurveKeys | None) -> Any:
    """A ROUTER of the context's kind, to be bound. With keys it takes encrypted connections alone, and lets nobody in
    but whom a `ZapHandler` of the context answers for."""
    socket = context.socket(zmq.ROUTER)
    configure(socket, bounds)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # default: messages for unknown peers vanish
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # default: a peer that reconnects is ignored until the old link dies
    if security is not None:
        be_server(socket, security)
        make_room_for_encryption(socket, bounds)
    return socket


def make_room_for_encryption(socket: "zmq.Socket[Any]", bounds: Bounds) -> None:
    """MAXMSGSIZE counts what is on the wire."""
    socket.setsockopt(zmq.MAXMSGSIZE, bounds.max_frame + OVERHEAD_BYTES)


def bind(socket: "zmq.Socket[Any]", host: str, port: int) -> str:
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


def receive_now(socket: "zmq.Socket[bytes]") -> Frames | None:
    """The next message at hand. A loop of our own, because pyzmq's asks the socket once a frame whether more follow."""
    try:
        frame = socket.recv(_NOW, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:  # a message is here as a whole or not at all
        frame = socket.recv(_NOW, copy=False)
        frames.append(frame)
    return frames


def send_now(socket: "zmq.Socket[bytes]", frames: Sequence[bytes | memoryview]) -> bool:
    """Queues a message; False if it can't be taken now. Large frames, which must be flat, go without a copy."""
    left = len(frames)
    try:
        for frame in frames:
            left -= 1
            # The queue refuses a message at its first frame: behind that one, the others are taken.
            socket.send(frame, _NOW_MORE if left else _NOW, copy=len(frame) < _MIN_BORROWED)
    except zmq.ZMQError:
        return False
    return True


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether one is at hand. pyzmq's `poll` makes a poller each time."""
    return bool(int(socket.getsockopt(_EVENTS)) & _IN)


def has_room(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a send would be taken now."""
    return bool(int(socket.getsockopt(_EVENTS)) & _OUT)


class Polled:
    """A context and a poller: what all of a worker's sockets have in common. For one thread only."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()

    def watch(self, mailbox: Mailbox[Any]) -> None:
        """Makes `poll` return when `mailbox` has something."""
        self._poller.register(mailbox.fileno(), zmq.POLLIN)

    def poll(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a message or a watched mailbox."""
        self._poller.poll(max(0, int(timeout * 1000)))
