"""Which keys may connect: the answering end of ZAP, by which libzmq asks before it lets a peer in (RFC 27)."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import zmq

from kvtransfer.complaints import Complaints
from kvtransfer.curve import ZAP_DOMAIN

logger = logging.getLogger(__name__)

_ENDPOINT: Final = "inproc://zeromq.zap.01"  # the standard's
_VERSION: Final = b"1.0"


class ZapHandler:
    """Answers for all sockets of a context, in a thread of its own that ends with the context.

    A peer that is let in carries the name of its key as User-Id on each of its messages. Without a handler that
    answers, nobody is let in: see `be_server`.
    """

    def __init__(self, context: "zmq.Context[Any]", admitted: Mapping[bytes, str]) -> None:
        """`admitted`: names by the 32 bytes of their keys. To be made before a socket of the context listens."""
        self._admitted = admitted
        self._complaints = Complaints()
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._socket = plain.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        threading.Thread(target=self._run, name="zap", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, frames: Sequence[bytes]) -> list[bytes]:
        """The reply to one question; a question that isn't understood is answered with no."""
        version, request_id, domain, address, _, mechanism, *credentials = [*frames, *[b""] * (6 - len(frames))]
        name = None
        if (version, domain, mechanism, len(credentials)) == (_VERSION, ZAP_DOMAIN, b"CURVE", 1):
            name = self._admitted.get(credentials[0])
        if name is not None:
            return [_VERSION, request_id, b"200", b"OK", name.encode(), b""]
        self._complain(address)
        return [_VERSION, request_id, b"400", b"unknown key", b"", b""]

    def _complain(self, address: bytes) -> None:
        if self._complaints.is_news(address, "unknown key", time.monotonic()):
            logger.warning(
                "a peer at %s was turned away: its key may not connect here", address.decode("ascii", "replace")
            )
