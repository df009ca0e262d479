"""The channel of the control plane, between a gateway and its workers. It moves messages, and knows nothing of
requests, blocks or tensors.

    gateway   ControlServer (ROUTER, asyncio)  <----  ControlClient (DEALER)   each worker, one per gateway

A message is one frame; anything else is refused before it is decoded. libzmq's own heartbeats notice a dead peer or a
cut link; they say nothing about the application behind it, so the protocol has beats of its own.

With `security` all of a channel is encrypted, the ends know each other by their keys, and a message is refused that
comes under the name of a worker whose key its sender has not.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from kvtransfer.codec import MAX_CONTROL_BYTES, encode
from kvtransfer.complaints import Complaints
from kvtransfer.curve import GATEWAY_KEY, CurveKeys
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.line import Dialling, Line
from kvtransfer.messages import GatewayToWorker, WorkerToGateway, decode_from_gateway, decode_from_worker
from kvtransfer.sockets import Bounds, Polled, bind, listening_router
from kvtransfer.zap import ZapHandler

logger = logging.getLogger(__name__)

CONTROL_HWM = 4096
"""Messages queued to one peer before a send fails. A step sends one message a gateway: minutes of silence."""
CONTROL_BOUNDS = Bounds(CONTROL_HWM, MAX_CONTROL_BYTES, receive_hwm=CONTROL_HWM)


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


class ControlClient(Polled):
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
