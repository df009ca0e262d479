"""The links that KV goes over, from prefill to decode workers. They move messages, and know nothing of requests, blocks
or tensors.

    decode    KvListener (ROUTER)  <----  KvDialer (DEALER)   prefill, one per decode worker

A message is a frame of words, or a KvHeader, K and V. Anything else is refused before it is decoded. Words wait for the
end of the caller's turn, which is its next `poll`, or for KV behind them: a frame of its own for each would cost both
sides a wake-up, and the queue a place.

Heartbeats and `security` are as in `kvtransfer/channel.py`.
"""

import time
from collections.abc import Sequence

import zmq

from kvtransfer.codec import encode
from kvtransfer.curve import GATEWAY_KEY, CurveKeys
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.kv_messages import (
    MAX_BODY_BYTES,
    DecodeToPrefill,
    KvHello,
    PrefillToDecode,
    decode_from_decode,
    decode_from_prefill,
)
from kvtransfer.layout import KvBody
from kvtransfer.line import Dialling, Line
from kvtransfer.messages import Refused
from kvtransfer.sockets import Bounds, Polled, bind, listening_router, receive_now, send_now
from kvtransfer.unsaid import UnsaidWords
from kvtransfer.worker_facts import Role
from kvtransfer.zap import ZapHandler

KV_HWM = 128
"""Messages, not bytes. The bound in bytes is each grant's window; this one holds where many transfers share a link."""
KV_RECEIVE_HWM = 4096
"""More than the windows of hundreds of transfers let come. A full queue is not only slow: behind it libzmq 4.3.5 aborts
the process if the other side has hung up and a heartbeat of it is still to be read."""
KV_BOUNDS = Bounds(KV_HWM, MAX_BODY_BYTES, receive_hwm=KV_RECEIVE_HWM)

MESSAGES_AT_ONCE = 16
"""From one peer, before others have their turn; each of up to MAX_WORDS."""

Received = tuple[bytes, PrefillToDecode | MessageError, KvBody | None]
"""The link that it came on, a word, and the KV behind it."""


class KvDialer(Polled):
    """Prefill's end of the KV links: one DEALER a decode worker. For one thread only."""

    def __init__(self, name: str, security: CurveKeys | None = None) -> None:
        super().__init__()
        self._name = name
        self._security = security
        self._lines: dict[str, Line] = {}
        self._unsaid = UnsaidWords[str](lambda peer, frame: self._send(peer, [frame]))
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
        self._unsaid.forget(peer)
        self._lines.pop(peer).close(linger=0)

    def receive(self) -> list[tuple[str, DecodeToPrefill | MessageError]]:
        """All words at hand, with the peer they come from. A link that can't be made says Refused by itself, and
        takes nothing from then on."""
        received: list[tuple[str, DecodeToPrefill | MessageError]] = []
        now = time.monotonic()
        for peer, line in self._lines.items():
            for frames in line.receive(MESSAGES_AT_ONCE):
                received += [(peer, word) for word in decode_from_decode.words([frame.buffer for frame in frames])]
            if (reason := line.tend(now)) is not None:
                received.append((peer, Refused(reason)))
        return received

    def send(self, peer: str, message: PrefillToDecode, body: KvBody | None = None) -> bool:
        """Takes a word, or a header with its body, which goes without a copy; False if the queue to this peer is full.
        A word that was taken is lost if the link is hung up before it has been said."""
        if body is None and not isinstance(message, KvHello):
            return self.has_room(peer) and self._unsaid.add(peer, encode(message))
        # Not in a frame with others: words would arrive with the body behind them only, and a KvHello has to be
        # understood by a peer that does not know the words of our version.
        self._unsaid.say_all()
        return self._unsaid.say(peer) and self._send(peer, [encode(message), *(body or ())])

    def has_room(self, peer: str) -> bool:
        """Whether a send to `peer` would be taken now."""
        return self._lines[peer].has_room() or self._note_full(peer)

    def poll(self, timeout: float) -> None:
        """Says what is unsaid, then waits as above, and also for room at each peer whose queue was full since the last
        call."""
        self._unsaid.say_all()
        super().poll(timeout)
        for peer in self._full:
            self._lines[peer].wake_for_room(False)
        self._full.clear()

    def _send(self, peer: str, frames: Sequence[bytes | memoryview]) -> bool:
        return self._lines[peer].send(frames) or self._note_full(peer)

    def _note_full(self, peer: str) -> bool:
        self._full.add(peer)
        self._lines[peer].wake_for_room(True)
        return False

    def close(self) -> None:
        for peer in list(self._lines):
            self.hang_up(peer)
        self._context.term()


class KvListener(Polled):
    """Decode's end of the KV links. For one thread only."""

    def __init__(self, host: str, port: int, security: CurveKeys | None = None) -> None:
        super().__init__()
        self._security = security
        self._unsaid = UnsaidWords(self._send_or_lose)
        if security is not None:
            ZapHandler(self._context, security.admitted(GATEWAY_KEY, Role.DECODE.value))
        self._socket: zmq.Socket[bytes] = listening_router(self._context, KV_BOUNDS, security)
        try:
            self.endpoint = bind(self._socket, host, port)
        except SettingsError:
            self.close()
            raise
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self) -> list[Received]:
        """The words of the next message, or a header with its KV; nothing if there is no message at hand."""
        frames = receive_now(self._socket)
        if frames is None:
            return []
        link = frames[0].bytes
        if self._security is not None:
            fault = self._security.identity_fault(link.decode("utf-8", "replace"), frames[0])
            if fault is not None:
                return [(link, fault, None)]
        if len(frames) not in (2, 4):
            return [(link, MessageError(f"{len(frames) - 1} frames, a KV message has 1 or 3"), None)]
        if len(frames) == 2:
            return [(link, word, None) for word in decode_from_prefill.words([frames[1].buffer])]
        found = decode_from_prefill.or_error([frames[1].buffer])
        header = MessageError("several words before K and V") if isinstance(found, list) else found
        return [(link, header, KvBody(frames[2].buffer, frames[3].buffer))]

    def send(self, link: bytes, message: DecodeToPrefill) -> None:
        """Takes a word. If the peer is gone, or takes nothing any more, when it is said, it is lost, as with a cut
        link."""
        self._unsaid.add(link, encode(message))

    def poll(self, timeout: float) -> None:
        """Says what is unsaid, then waits as above."""
        self._unsaid.say_all()
        super().poll(timeout)

    def _send_or_lose(self, link: bytes, frame: bytes) -> bool:
        send_now(self._socket, [link, frame])
        return True

    def close(self) -> None:
        self._unsaid.say_all()
        self._socket.close()
        self._context.term()
