"""What the transfer benchmark's two processes ask of a side's two ends, and kvsplice's own: KvSender and KvReceiver.

parent: SendingEnd.send_round(n)  ------- K and V -------->  child: ReceivingEnd.receive_round(n)
        returns when the other side has said that it has all of round n
"""

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from engine.buffers import from_bytes
from engine.kv_cache import dtype_named
from experiments.transfer_load import Load, LoadPool
from kvtransfer.codec import PROTOCOL_VERSION, RequestKey
from kvtransfer.curve import CurveKeys
from kvtransfer.frames import FrameOptions
from kvtransfer.incoming import KvOffered, ReceptionOutcome
from kvtransfer.kv_channel import KvListener
from kvtransfer.kv_messages import KvHeader, KvHello
from kvtransfer.layout import KvBody
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import Piece, TransferOutcome
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.receiver import KvReceiver
from kvtransfer.send_commands import SenderTiming
from kvtransfer.sender import KvSender
from kvtransfer.worker_facts import Fingerprint

ROUND_SECONDS: Final = 120.0
"""A round that takes longer is given up."""
LEASE: Final = 60.0
"""The default of --lease-s."""
PREFILL: Final = ("bench-prefill", "g1")
DECODE: Final = ("bench-decode", "g2")
_FINGERPRINT: Final = Fingerprint("bench", "bench", "bench", "bench", vocab_size=1)


class SendingEnd(Protocol):
    """The end that is timed."""

    def send_round(self, number: int) -> None: ...

    def close(self) -> None: ...


class ReceivingEnd(Protocol):
    """The end in the other process. `endpoint` is what its sending end connects to."""

    endpoint: str

    def prepare(self, number: int) -> None:
        """Round `number` begins when this has returned."""
        ...

    def receive_round(self, number: int) -> None:
        """Returns when all of the round is here and the sender has been told."""
        ...

    def close(self) -> None: ...


class BenchError(Exception):
    """A round did not end as it should: its time would mean nothing."""


def keys_of(load: Load, number: int) -> list[RequestKey]:
    """The requests of a round."""
    return [(f"round-{number}-{request}", 0) for request in range(load.requests)]


class KvSendingEnd:
    """Prefill's end: all requests of a round are computed already, so the wire alone is timed."""

    def __init__(
        self, load: Load, pool: LoadPool, endpoint: str, options: FrameOptions, security: CurveKeys | None
    ) -> None:
        self._load, self._pool = load, pool
        self._target = DecodeTarget(*DECODE, endpoint)
        self._requests: dict[RequestKey, int] = {}
        self._events: Mailbox[Any] = Mailbox()
        hello = KvHello(PROTOCOL_VERSION, *PREFILL, _FINGERPRINT, load.layout)
        self._sender = KvSender(hello, self, self._events, SenderTiming(LEASE / 4, LEASE), security, options)
        self._sender.start()

    def gather(self, key: RequestKey, piece: Piece) -> KvBody:
        """KvSource, as a prefill worker's."""
        return KvBody(*self._pool.gather(self._requests[key], piece))

    def send_round(self, number: int) -> None:
        load, keys = self._load, keys_of(self._load, number)
        self._requests = {key: request for request, key in enumerate(keys)}
        for key in keys:
            self._sender.open(key, self._target, load.tokens)
        for layer in range(load.layout.num_layers):
            self._sender.ready(layer, [(key, load.tokens) for key in keys])
        for key in keys:
            self._sender.first_token(key, token_id=0)
        wait_for_ends(self._events, len(keys), TransferOutcome.DONE)

    def close(self) -> None:
        self._sender.stop()
        self._events.close()


class KvReceivingEnd:
    """Decode's end, with room for all requests of a round."""

    def __init__(self, load: Load, pool: LoadPool, window_bytes: int, security: CurveKeys | None) -> None:
        self._load, self._pool = load, pool
        self._dtype = dtype_named(load.layout.dtype)
        self._requests: dict[RequestKey, int] = {}
        self._events: Mailbox[Any] = Mailbox()
        listener = KvListener("127.0.0.1", 0, security)
        self.endpoint = listener.endpoint
        limits = ReceiverLimits(window_bytes, LEASE)
        self._receiver = KvReceiver(listener, (_FINGERPRINT, load.layout), DECODE[1], self, limits, self._events)
        self._receiver.start()

    def splice(self, key: RequestKey, header: KvHeader, body: KvBody) -> None:
        """KvSink, as a decode worker's."""
        shape = (header.num_rows, header.head_stop - header.head_start, self._load.layout.head_dim)
        k, v = (from_bytes(part, self._dtype, shape) for part in (body.k, body.v))
        blocks = self._pool.block_ids[self._requests[key]]
        where = header.layer, blocks, header.start, header.stop
        self._pool.kv_cache.splice(*where, k, v, header.head_start, header.num_layers)

    def finish(self, key: RequestKey) -> None:
        """KvSink: a CPU has it already."""

    def prepare(self, number: int) -> None:
        keys = keys_of(self._load, number)
        self._requests = {key: request for request, key in enumerate(keys)}
        for key in keys:
            self._receiver.expect(key, PREFILL, self._load.tokens)

    def receive_round(self, number: int) -> None:
        """Room for all is there, so what is offered is granted."""
        wait_for_ends(self._events, self._load.requests, ReceptionOutcome.ARRIVED, self._grant)

    def _grant(self, offered: KvOffered) -> None:
        self._receiver.grant(offered.key, first_token=0)

    def close(self) -> None:
        self._receiver.stop()
        self._events.close()


def wait_for_ends(
    events: Mailbox[Any],
    count: int,
    wanted: TransferOutcome | ReceptionOutcome,
    grant: Callable[[KvOffered], None] | None = None,
) -> None:
    """Takes `count` ends. Raises BenchError if one is not as wanted, or they take too long."""
    deadline = time.monotonic() + ROUND_SECONDS
    while count > 0:
        left = deadline - time.monotonic()
        if left <= 0:
            raise BenchError(f"{count} transfers have not ended within {ROUND_SECONDS:g} s")
        for event in events.wait(left):  # none: the wake-up was for some taken before
            if isinstance(event, KvOffered):
                assert grant is not None, event
                grant(event)
                continue
            if event.outcome is not wanted:
                raise BenchError(f"{event.key} ended as {event.outcome.value}: {event.reason}")
            count -= 1
