"""What decode's end of the KV hand-over does with each command and message. No thread, socket or clock: messages leave
through `send`, `now` is seconds, monotonic. The thread around it is `kvtransfer/receiver.py`.

A prefill worker hangs up a link that it has not used for a lease, so one that was silent for IDLE_LEASES is forgotten.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.complaints import Complaints
from kvtransfer.errors import MessageError, ProtocolError
from kvtransfer.incoming import (
    IncomingBook,
    IncomingTransfer,
    KvOffered,
    ParkedOffer,
    PeerId,
    ReceptionEnded,
    ReceptionOutcome,
)
from kvtransfer.layout import KvBody, check_header
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
class Expect:
    """KV of `num_tokens` tokens will be offered by `peer`; answered by KvOffered, and in the end by ReceptionEnded."""

    key: RequestKey
    peer: PeerId
    num_tokens: int


@dataclass(frozen=True)
class Grant:
    """Blocks are reserved for what was offered, and the tokens before `first_token` are there already."""

    key: RequestKey
    first_token: int


@dataclass(frozen=True)
class Close:
    """Give a reception up; answered by ReceptionEnded unless it has ended already."""

    key: RequestKey
    reason: str


ReceiveCommand = Expect | Grant | Close


@dataclass(frozen=True)
class ReceiverLimits:
    """Window of each grant in bytes, and seconds of a peer's silence after which its transfers are given up."""

    window_bytes: int
    lease: float


class ReceiveMachine:
    """Takes KV for a decode worker. `identity`: what its pool holds; `report` takes what the engine has to know.

    `num_dropped` counts messages of attempts that are over, and of peers that did not introduce themselves.
    """

    def __init__(
        self,
        identity: tuple[Fingerprint, KvLayout],
        generation: str,
        sink: KvSink,
        limits: ReceiverLimits,
        send: Callable[[bytes, DecodeToPrefill], bool],
        report: Callable[[KvOffered | ReceptionEnded], None],
    ) -> None:
        self._vocab_size, self._layout = identity[0].vocab_size, identity[1]
        self._generation = generation
        self._sink = sink
        self._limits = limits
        self._send = send
        self._report = report
        self._book = IncomingBook()
        self._peers = PeerBook(identity)
        self._complaints = Complaints()
        self._next_sweep = 0.0
        self._first_frame_at: dict[RequestKey, float] = {}
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._book)

    @property
    def sweep_interval(self) -> float:
        """Seconds between two calls of `sweep` that do something."""
        return min(1.0, self._limits.lease / SWEEPS_A_LEASE)

    def apply(self, command: ReceiveCommand, now: float) -> None:
        match command:
            case Expect():
                self._expect(command, now)
            case Grant(key, first_token):
                self._grant(key, first_token)
            case Close(key, reason):
                transfer = self._book.get(key)
                if transfer is not None and transfer.link is not None:
                    self._send(transfer.link, KvRevoke(*key, reason=reason))
                self._end(key, ReceptionOutcome.CLOSED, reason)

    def _expect(self, command: Expect, now: float) -> None:
        layers = self._layout.num_layers
        transfer = IncomingTransfer(command.key, command.peer, command.num_tokens, layers, now)
        offer = self._book.open(transfer)
        if offer is not None and offer.abort_reason is not None:
            self._end(command.key, ReceptionOutcome.ABORTED, offer.abort_reason)
        elif offer is not None:
            self._accept(transfer, offer.link, offer.num_tokens)

    def _grant(self, key: RequestKey, first_token: int) -> None:
        """Lets an offered transfer come; one that has ended meanwhile has said so already."""
        transfer = self._book.get(key)
        if transfer is not None:
            transfer.grant(first_token)
            self._say_grant(transfer)

    def _say_grant(self, transfer: IncomingTransfer) -> None:
        assert transfer.link is not None, transfer.key
        assert transfer.first_token is not None, transfer.key
        self._send(transfer.link, KvGrant(*transfer.key, transfer.first_token, self._limits.window_bytes))

    def _accept(self, transfer: IncomingTransfer, link: bytes, num_tokens: int) -> None:
        """Takes an offer; a repeated one is answered again, in case a grant or a credit was lost."""
        if num_tokens != transfer.num_tokens:
            reason = f"{num_tokens} tokens offered, {transfer.num_tokens} expected"
            self._send(link, KvRevoke(*transfer.key, reason=reason))
            self._end(transfer.key, ReceptionOutcome.FAILED, reason)
            return
        is_first, transfer.link = transfer.link is None, link
        if is_first:
            self._report(KvOffered(transfer.key))
        if transfer.first_token is not None:
            self._say_grant(transfer)
        if transfer.spliced_bytes:
            self._credit(transfer)

    def on_message(self, link: bytes, message: PrefillToDecode | MessageError, body: KvBody | None, now: float) -> None:
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
            self._on_transfer_message(transfer, message, body, now)

    def _on_hello(self, link: bytes, hello: KvHello, now: float) -> None:
        fault = self._peers.introduce(link, hello, now)
        if fault is not None:
            if self._complaints.is_news(link, fault, now):
                logger.error("prefill worker %s refused: %s", hello.worker_id, fault)
            self._send(link, Refused(fault[:MAX_TEXT_CHARS]))
            return
        self._end_former_transfers((hello.worker_id, hello.generation))
        logger.info("prefill worker %s is connected", hello.worker_id)
        self._send(link, KvWelcome(self._generation))

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
        self,
        transfer: IncomingTransfer,
        message: KvHeader | KvFirstToken | KvAbort,
        body: KvBody | None,
        now: float,
    ) -> None:
        match message:
            case KvHeader():
                assert body is not None
                self._on_frame(transfer, message, body, now)
            case KvFirstToken():
                if message.token_id >= self._vocab_size:
                    raise ProtocolError(f"first token {message.token_id} of {self._vocab_size}")
                if not transfer.has_all_kv:
                    raise ProtocolError("the first token came before the last KV frame")
                transfer.first_token_id = message.token_id
                self._arrived(transfer)
            case KvAbort():
                self._end(transfer.key, ReceptionOutcome.ABORTED, message.reason)

    def _on_frame(self, transfer: IncomingTransfer, header: KvHeader, body: KvBody, now: float) -> None:
        check_header(header, len(body.k), len(body.v), self._layout)
        if (header.head_start, header.head_stop) != (0, self._layout.num_kv_heads):
            raise ProtocolError("this receiver takes all KV heads of a token at once")
        transfer.check(header)
        self._first_frame_at.setdefault(transfer.key, now)
        self._sink.splice(transfer.key, header, body)
        transfer.spliced(header, len(body.k) + len(body.v))
        if transfer.uncredited_bytes >= self._limits.window_bytes // 4 or transfer.has_all_kv:
            self._credit(transfer)

    def _credit(self, transfer: IncomingTransfer) -> None:
        assert transfer.link is not None, transfer.key
        if self._send(transfer.link, KvCredit(*transfer.key, spliced_bytes=transfer.spliced_bytes)):
            transfer.credited_bytes = transfer.spliced_bytes

    def _arrived(self, transfer: IncomingTransfer) -> None:
        assert transfer.link is not None, transfer.key
        self._sink.finish(transfer.key)
        self._send(transfer.link, KvDone(*transfer.key))
        self._end(transfer.key, ReceptionOutcome.ARRIVED, first_token_id=transfer.first_token_id)

    def _end(
        self, key: RequestKey, outcome: ReceptionOutcome, reason: str = "", first_token_id: int | None = None
    ) -> None:
        first_frame_at = self._first_frame_at.pop(key, None)
        if self._book.close(key, outcome) is not None:
            self._report(ReceptionEnded(key, outcome, first_token_id, first_frame_at, reason))

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

    def sweep(self, now: float) -> None:
        if now < self._next_sweep:
            return
        self._next_sweep = now + self.sweep_interval
        self._peers.forget_idle(now - IDLE_LEASES * self._limits.lease, {transfer.peer for transfer in self._book})
        for transfer in self._book.silent_since(now - self._limits.lease):
            if transfer.link is not None:
                self._send(transfer.link, KvRevoke(*transfer.key, reason="the lease ran out"))
            reason = f"nothing heard from the prefill worker for {self._limits.lease:g} s"
            self._end(transfer.key, ReceptionOutcome.FAILED, reason)
