"""A connection that is dialled in the background and watched: what libzmq would try for ever, or never again, is given
up and dialled anew. What becomes of it is in `Handshakes`."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtransfer.addresses import check_endpoint
from kvtransfer.curve import CurveKeys, be_client
from kvtransfer.errors import SettingsError
from kvtransfer.handshakes import Handshakes, LineState
from kvtransfer.sockets import (
    Bounds,
    Frames,
    beat,
    configure,
    has_message,
    has_room,
    make_room_for_encryption,
    receive_now,
    send_now,
)

_WATCHED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@dataclass(frozen=True)
class Dialling:
    """Whom to dial, under which name and how. Without `queue_offline`, sends fail while there is no connection.

    `security`: our keys and the server's, or None for a connection in clear.
    """

    name: str
    endpoint: str
    bounds: Bounds
    queue_offline: bool
    security: tuple[CurveKeys, bytes] | None = None


class Line:
    """A DEALER that connects in the background, and is watched. It is given up when its handshakes fail; what was
    queued is lost then, as it is with any cut. For one thread only."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", poller: zmq.Poller, dialling: Dialling) -> None:
        """Raises SettingsError for an endpoint that libzmq could not dial, or would try to for ever."""
        check_endpoint(f"endpoint {dialling.endpoint!r}", dialling.endpoint)
        self._context, self._poller, self._dialling = context, poller, dialling
        self._handshakes = Handshakes()
        self.socket: zmq.Socket[bytes] | None = None  # None where it is given up
        self._monitor: zmq.Socket[bytes] | None = None
        self._open()

    @property
    def is_up(self) -> bool:
        """Whether a handshake is done and the connection not cut since, as of the last `tend`."""
        return self._handshakes.state is LineState.UP

    def tend(self, now: float) -> str | None:
        """Takes in what has become of the connection; says why if that is the end of it."""
        while self._monitor is not None and has_message(self._monitor):
            event = recv_monitor_message(self._monitor)
            if reason := self._on_event(event["event"], event["value"], now):
                self.close(linger=0)
                return reason
        return None

    def redial_if_due(self, now: float) -> None:
        """A new socket for a connection that was given up, once its delay is over."""
        if self._handshakes.is_due(now):
            self._handshakes.redialled()
            self._open()

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Queues a message, its frames without a copy; False if the queue is full, or there is no connection."""
        return self.socket is not None and send_now(self.socket, frames)

    def has_room(self) -> bool:
        """Whether a send would be taken now."""
        return self.socket is not None and has_room(self.socket)

    def wake_for_room(self, is_wanted: bool) -> None:
        """Whether the poller is to return for room in the queue, too."""
        if self.socket is not None:
            self._poller.modify(self.socket, zmq.POLLIN | zmq.POLLOUT if is_wanted else zmq.POLLIN)

    def receive(self, limit: int = 256) -> list[Frames]:
        """Up to `limit` messages, so that one busy peer can't keep the caller from the others."""
        messages: list[Frames] = []
        if self.socket is None or not has_message(self.socket):  # cheaper than to try in vain
            return messages
        while len(messages) < limit and (frames := receive_now(self.socket)) is not None:
            messages.append(frames)
        return messages

    def close(self, linger: int | None = None) -> None:
        """Ends the connection, if there is one. `linger`: milliseconds for what is queued; None: the socket's own."""
        if self.socket is None or self._monitor is None:
            return
        self._poller.unregister(self.socket)
        self._poller.unregister(self._monitor)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger)
        self.socket = self._monitor = None

    def _on_event(self, event: int, value: int, now: float) -> str | None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handshakes.succeeded()
        elif event == zmq.EVENT_DISCONNECTED:
            self._handshakes.cut()
        elif self._handshakes.failed(now, is_refusal=event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            return _why(event, value)
        return None

    def _open(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            _prepare(socket, self._dialling)
            self._monitor = socket.get_monitor_socket(_WATCHED, f"inproc://monitor-{secrets.token_hex(8)}")
            socket.connect(self._dialling.endpoint)
        except zmq.ZMQError as error:
            if self._monitor is not None:
                self._monitor.close(linger=0)
                self._monitor = None
            socket.close()  # an open socket would keep the context from ending
            raise SettingsError(f"cannot connect to {self._dialling.endpoint!r}: {error.strerror}") from error
        self.socket = socket
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)


def _prepare(socket: "zmq.Socket[bytes]", dialling: Dialling) -> None:
    configure(socket, dialling.bounds)
    beat(socket)
    socket.setsockopt_string(zmq.ROUTING_ID, dialling.name)
    socket.setsockopt(zmq.IMMEDIATE, 0 if dialling.queue_offline else 1)
    if "[" in dialling.endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if dialling.security is not None:
        be_client(socket, *dialling.security)
        make_room_for_encryption(socket, dialling.bounds)


def _why(event: int, value: int) -> str:
    """What an operator can do about a handshake that failed."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "our key may not connect there"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"the handshake is not understood (0x{value:x}); keys belong to both sides or to none"
    return "the handshake breaks off; has the other side another key than we know, or no time?"
