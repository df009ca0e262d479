"""Decode's end of the KV hand-over, in a thread of its own: KV is spliced off the step loop.

1. A prefill worker introduces itself (KvHello); one whose model or KV layout differs is refused with the difference.
2. The engine reserves blocks and expects a transfer; prefill offers it. Once both are there, in whatever order, prefill
   gets its grant: the first token wanted and a window in bytes.
3. Each frame is checked against the books and the pool's layout, then copied into blocks that the request owns.
   Credits go back as bytes are spliced.
4. With the last layer's last token and the first sampled token here, prefill gets KvDone and the engine ReceptionEnded.
   However a reception ends, the engine gets exactly one ReceptionEnded, after the last write: only then may it free.

A prefill worker hangs up a link that it has not used for a lease, so one that was silent for IDLE_LEASES is forgotten.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtransfer.channel import KvBody, KvListener
from kvtransfer.complaints import Complaints
from kvtransfer.errors import MessageError, ProtocolError
from kvtransfer.incoming import IncomingBook, IncomingTransfer, ParkedOffer, PeerId, ReceptionEnded, ReceptionOutcome
from kvtransfer.layout import check_header
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    MAX_TEXT_CHARS,
    DecodeToPrefill,
    Fingerprint,
    KvAbort,
    KvCredit,
    KvDone,
    KvFirstToken,
    KvGrant,
    KvHeader,
    KvHello,
    KvLayout,
    KvOffer,
    KvRevoke,
    KvWelcome,
    PrefillToDecode,
    Refused,
    RequestKey,
)
from kvtransfer.peers import PeerBook

logger = logging.getLogger(__name__)

MESSAGES_A_TURN = 64
IDLE_LEASES = 8
SWEEPS_A_LEASE = 4


class KvSink(Protocol):
    """Where KV is written to: the decode worker's pool."""

    def splice(self, key: RequestKey, header: KvHeader, body: KvBody) -> None:
        """Copies K and V of one layer's tokens into the blocks that `key` owns."""
        ...

    def finish(self, key: RequestKey) -> None:
        """Returns when all that was spliced for `key` can be read by the next step."""
        ...


@dataclass(frozen=True)
class _Expect:
    key: RequestKey
    peer: PeerId
    num_tokens: int
    first_token: int


@dataclass(frozen=True)
class _Close:
    key: RequestKey
    reason: str


@dataclass(frozen=True)
class _Stop:
    pass


_Command = _Expect | _Close | _Stop


@dataclass(frozen=True)
class ReceiverLimits:
    """Window of each grant in bytes, and seconds of a peer's silence after which its transfers are given up."""

    window_bytes: int
    lease: float


@dataclass
class KvReceiver:
    """Takes KV for this decode worker. `events` takes what the engine has to know."""

    listener: KvListener
    identity: tuple[Fingerprint, KvLayout]
    generation: str
    sink: KvSink
    limits: ReceiverLimits
    events: Mailbox[Any]
    num_dropped: int = 0  # messages of attempts that are over, and of peers that did not introduce themselves
    _commands: Mailbox[_Command] = field(default_factory=Mailbox)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self._book = IncomingBook()
        self._peers = PeerBook(self.identity)
        self._complaints = Complaints()
        self._next_sweep = 0.0
        self._first_frame_at: dict[RequestKey, float] = {}
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)

    # --- for the engine's thread

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the receiver still runs: without it the engine must stop."""
        return self._thread.is_alive()

    def expect(self, key: RequestKey, peer: PeerId, num_tokens: int, first_token: int) -> None:
        """Blocks for `num_tokens` tokens are reserved, and those before `first_token` are there already."""
        self._commands.put(_Expect(key, peer, num_tokens, first_token))

    def close(self, key: RequestKey, reason: str) -> None:
        """Gives a reception up; answered by ReceptionEnded unless it has ended already."""
        self._commands.put(_Close(key, reason))

    def stop(self, timeout: float = 2.0) -> None:
        self._commands.put(_Stop())
        self._thread.join(timeout)

    # --- the thread

    def _run(self) -> None:
        self.listener.watch(self._commands)
        while not self._stopping:
            self.listener.poll(self._sweep_interval)
            now = time.monotonic()
            for command in self._commands.drain():
                self._apply(command, now)
            self._receive_some(now)
            self._sweep(now)
        self.listener.close()

    @property
    def _sweep_interval(self) -> float:
        return min(1.0, self.limits.lease / SWEEPS_A_LEASE)

    def _receive_some(self, now: float) -> None:
        for _ in range(MESSAGES_A_TURN):
            received = self.listener.receive()
            if received is None:
                return
            self._on_message(*received, now)

    def _apply(self, command: _Command, now: float) -> None:
        match command:
            case _Expect():
                self._expect(command, now)
            case _Close(key, reason):
                transfer = self._book.get(key)
                if transfer is not None and transfer.link is not None:
                    self._send(transfer.link, KvRevoke(*key, reason=reason))
                self._end(key, ReceptionOutcome.CLOSED, reason)
            case _Stop():
                self._stopping = True

    def _expect(self, command: _Expect, now: float) -> None:
        layers = self.identity[1].num_layers
        transfer = IncomingTransfer(command.key, command.peer, command.num_tokens, command.first_token, layers, now)
        offer = self._book.open(transfer)
        if offer is not None and offer.abort_reason is not None:
            self._end(command.key, ReceptionOutcome.ABORTED, offer.abort_reason)
        elif offer is not None:
            self._accept(transfer, offer.link, offer.num_tokens)

    def _accept(self, transfer: IncomingTransfer, link: bytes, num_tokens: int) -> None:
        """Grants an offered transfer; a repeated offer is answered again, in case a grant or a credit was lost."""
        if num_tokens != transfer.num_tokens:
            reason = f"{num_tokens} tokens offered, {transfer.num_tokens} expected"
            self._send(link, KvRevoke(*transfer.key, reason=reason))
            self._end(transfer.key, ReceptionOutcome.FAILED, reason)
            return
        transfer.link = link
        self._send(link, KvGrant(*transfer.key, transfer.first_token, self.limits.window_bytes))
        if transfer.spliced_bytes:
            self._credit(transfer)

    def _on_message(
        self, link: bytes, message: PrefillToDecode | MessageError, body: KvBody | None, now: float
    ) -> None:
        try:
            self._handle(link, message, body, now)
        except ProtocolError as error:
            self._drop_peer(link, str(error), now)

    def _handle(self, link: bytes, message: PrefillToDecode | MessageError, body: KvBody | None, now: float) -> None:
        if isinstance(message, MessageError):
            raise message
        if isinstance(message, KvHello):
            self._on_hello(link, message, now)
            return
        peer = self._peers.heard_on(link, now)
        if peer is None:
            raise ProtocolError("a message before KvHello")
        if (body is not None) != isinstance(message, KvHeader):
            raise ProtocolError("bodies belong to KvHeader, and to nothing else")
        key = (message.request_id, message.attempt)
        if isinstance(message, KvOffer):
            self._on_offer(link, peer, message, now)
        elif (transfer := self._book.find(key, peer)) is None:
            self._on_stray(link, peer, message, now)
        elif transfer.link != link and not isinstance(message, KvAbort):
            raise ProtocolError("KV that was not offered on this link")
        else:
            transfer.last_sign = now
            self._on_transfer_message(transfer, message, body)

    def _on_hello(self, link: bytes, hello: KvHello, now: float) -> None:
        fault = self._peers.introduce(link, hello, now)
        if fault is not None:
            if self._complaints.is_news(link, fault, now):
                logger.error("prefill worker %s refused: %s", hello.worker_id, fault)
            self._send(link, Refused(fault[:MAX_TEXT_CHARS]))
            return
        self._end_former_transfers((hello.worker_id, hello.generation))
        logger.info("prefill worker %s is connected", hello.worker_id)
        self._send(link, KvWelcome(self.generation))

    def _end_former_transfers(self, peer: PeerId) -> None:
        """A worker dials anew after a restart or on a new link: what it had offered before will never come."""
        worker_id, _ = peer
        for transfer in self._book:
            if transfer.peer[0] == worker_id and (transfer.peer != peer or transfer.link is not None):
                self._end(transfer.key, ReceptionOutcome.FAILED, "the prefill worker was restarted or dialled anew")

    def _on_offer(self, link: bytes, peer: PeerId, offer: KvOffer, now: float) -> None:
        key = (offer.request_id, offer.attempt)
        ended = self._book.ended(key)
        if (transfer := self._book.find(key, peer)) is not None:
            transfer.last_sign = now
            self._accept(transfer, link, offer.num_tokens)
        elif ended is ReceptionOutcome.ARRIVED:
            self._send(link, KvDone(*key))
        elif ended is not None:
            self._send(link, KvRevoke(*key, reason="no longer wanted"))
        else:
            self._park(key, ParkedOffer(peer, link, offer.num_tokens, now))

    def _park(self, key: RequestKey, offer: ParkedOffer) -> None:
        """Whose offer has to make room is told, unless it was withdrawn already."""
        evicted = self._book.park(key, offer)
        if evicted is not None and evicted[1].abort_reason is None:
            evicted_key, evicted_offer = evicted
            self._send(evicted_offer.link, KvRevoke(*evicted_key, reason="too many offers wait for a reservation"))

    def _on_stray(self, link: bytes, peer: PeerId, message: KvHeader | KvFirstToken | KvAbort, now: float) -> None:
        """Something for an attempt that is over, or was never ours: dropped and counted. An abort may also have
        overtaken the reservation, which then must not wait for KV."""
        key = (message.request_id, message.attempt)
        if isinstance(message, KvAbort) and self._book.ended(key) is None:
            self._park(key, ParkedOffer(peer, link, 0, now, message.reason))
        else:
            self.num_dropped += 1

    def _on_transfer_message(
        self, transfer: IncomingTransfer, message: KvHeader | KvFirstToken | KvAbort, body: KvBody | None
    ) -> None:
        match message:
            case KvHeader():
                assert body is not None
                self._on_frame(transfer, message, body)
            case KvFirstToken():
                if message.token_id >= self.identity[0].vocab_size:
                    raise ProtocolError(f"first token {message.token_id} of {self.identity[0].vocab_size}")
                if not transfer.has_all_kv:
                    raise ProtocolError("the first token came before the last KV frame")
                transfer.first_token_id = message.token_id
                self._arrived(transfer)
            case KvAbort():
                self._end(transfer.key, ReceptionOutcome.ABORTED, message.reason)

    def _on_frame(self, transfer: IncomingTransfer, header: KvHeader, body: KvBody) -> None:
        check_header(header, len(body.k), len(body.v), self.identity[1])
        if (header.head_start, header.head_stop) != (0, self.identity[1].num_kv_heads):
            raise ProtocolError("this receiver takes all KV heads of a token at once")
        transfer.check(header)
        self._first_frame_at.setdefault(transfer.key, time.monotonic())
        self.sink.splice(transfer.key, header, body)
        transfer.spliced(header, len(body.k) + len(body.v))
        if transfer.uncredited_bytes >= self.limits.window_bytes // 4 or transfer.has_all_kv:
            self._credit(transfer)

    def _credit(self, transfer: IncomingTransfer) -> None:
        assert transfer.link is not None, transfer.key
        if self._send(transfer.link, KvCredit(*transfer.key, spliced_bytes=transfer.spliced_bytes)):
            transfer.credited_bytes = transfer.spliced_bytes

    def _arrived(self, transfer: IncomingTransfer) -> None:
        assert transfer.link is not None, transfer.key
        self.sink.finish(transfer.key)
        self._send(transfer.link, KvDone(*transfer.key))
        self._end(transfer.key, ReceptionOutcome.ARRIVED, first_token_id=transfer.first_token_id)

    def _end(
        self, key: RequestKey, outcome: ReceptionOutcome, reason: str = "", first_token_id: int | None = None
    ) -> None:
        first_frame_at = self._first_frame_at.pop(key, None)
        if self._book.close(key, outcome) is not None:
            self.events.put(ReceptionEnded(key, outcome, first_token_id, first_frame_at, reason))

    def _drop_peer(self, link: bytes, reason: str, now: float) -> None:
        """A breach of protocol costs the sender its link, and the transfers on it; nobody else anything.

        What was on its way behind the breach, and strangers' noise, is counted and not logged: a log has a ceiling.
        """
        peer = self._peers.forget(link)
        self._send(link, Refused("the link broke the protocol"))
        if peer is None:
            self.num_dropped += 1
            return
        if self._complaints.is_news(link, reason, now):
            logger.error("KV peer %s broke the protocol: %s", peer[0], reason)
        for transfer in self._book:
            if transfer.peer == peer:
                self._end(transfer.key, ReceptionOutcome.FAILED, "the prefill worker broke the protocol")

    def _sweep(self, now: float) -> None:
        if now < self._next_sweep:
            return
        self._next_sweep = now + self._sweep_interval
        self._peers.forget_idle(now - IDLE_LEASES * self.limits.lease, {transfer.peer for transfer in self._book})
        for transfer in self._book.silent_since(now - self.limits.lease):
            if transfer.link is not None:
                self._send(transfer.link, KvRevoke(*transfer.key, reason="the lease ran out"))
            reason = f"nothing heard from the prefill worker for {self.limits.lease:g} s"
            self._end(transfer.key, ReceptionOutcome.FAILED, reason)

    def _send(self, link: bytes, message: DecodeToPrefill) -> bool:
        return self.listener.send(link, message)
