"""What decode's end of the KV hand-over does with each command and message. No thread, socket or clock: messages leave
through `send`, `now` is seconds, monotonic. The thread around it is `kvtransfer/receiver.py`.

A prefill worker hangs up a link that it has not used for a lease, so one that was silent for IDLE_LEASES is forgotten.
"""

import logging
from collections.abc import Callable

from kvtransfer.codec import MAX_TEXT_CHARS, RequestKey
from kvtransfer.errors import LossError, MessageError, ProtocolError
from kvtransfer.incoming import (
    HeadRange,
    IncomingBook,
    IncomingTransfer,
    KvOffered,
    ParkedOffer,
    PeerId,
    ReceptionEnded,
    ReceptionOutcome,
)
from kvtransfer.intake import FrameIntake, IntakeCounts, KvSink
from kvtransfer.kv_messages import (
    DecodeToPrefill,
    KvAbort,
    KvDone,
    KvFirstToken,
    KvGrant,
    KvHeader,
    KvHello,
    KvOffer,
    KvRevoke,
    KvWelcome,
    PrefillToDecode,
)
from kvtransfer.layout import FP8, KvBody
from kvtransfer.link_name import worker_of
from kvtransfer.messages import Refused
from kvtransfer.peers import PeerBook
from kvtransfer.receive_commands import Close, Expect, Grant, ReceiveCommand, ReceiverLimits
from kvtransfer.reception_ends import ReceptionEnds
from kvtransfer.stream import IncomingStream
from kvtransfer.worker_facts import Fingerprint, KvLayout, KvTraffic
from kvtransfer.worker_lines import WorkerLines

logger = logging.getLogger(__name__)

IDLE_LEASES = 8
SWEEPS_A_LEASE = 4


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
        send: Callable[[bytes, DecodeToPrefill], None],
        report: Callable[[KvOffered | ReceptionEnded], None],
    ) -> None:
        self._vocab_size, self._layout = identity[0].vocab_size, identity[1]
        self._generation = generation
        self._limits = limits
        self._send = send
        self._report = report
        self._intake = FrameIntake(self._layout, sink, limits.window_bytes, send)
        self._book = IncomingBook()
        self._ends = ReceptionEnds(self._book, sink, send, report)
        self._peers = PeerBook(identity)
        self._lines = WorkerLines(logger)
        self._loss_lines = WorkerLines(logger, topic="KV lost on the way from it")
        self._next_sweep = 0.0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._book)

    @property
    def counts(self) -> IntakeCounts:
        """What has come of the frames so far."""
        return self._intake.counts

    @property
    def traffic(self) -> KvTraffic:
        counts = self._intake.counts
        return KvTraffic(
            num_bytes=counts.spliced_bytes,
            num_late=self.num_dropped,
            num_stale=counts.num_stale,
            num_corrupt=counts.num_corrupt,
            num_resends=counts.num_resends,
        )

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
                self._ends.end(key, ReceptionOutcome.CLOSED, reason)

    def _expect(self, command: Expect, now: float) -> None:
        layers, heads = self._layout.num_layers, self._layout.num_kv_heads
        transfer = IncomingTransfer(command.key, command.peer, command.num_tokens, layers, heads)
        offers = self._book.open(transfer)
        reasons = [offer.abort_reason for offer in offers if offer.abort_reason is not None]
        if reasons:
            self._ends.end(command.key, ReceptionOutcome.ABORTED, reasons[0])
            return
        for offer in offers:
            if self._book.get(command.key) is transfer:  # not ended by the offer before
                self._accept_parked(transfer, offer, now)

    def _accept_parked(self, transfer: IncomingTransfer, offer: ParkedOffer, now: float) -> None:
        try:
            self._accept(transfer, offer.link, offer.heads, KvOffer(*transfer.key, offer.num_tokens), now)
        except ProtocolError as error:
            self._drop_peer(offer.link, str(error), now)

    def _grant(self, key: RequestKey, first_token: int) -> None:
        """Lets an offered transfer come; one that has ended meanwhile has said so already."""
        transfer = self._book.get(key)
        if transfer is not None:
            transfer.grant(first_token)
            for stream in transfer.streams.values():
                self._say_grant(stream)

    def _say_grant(self, stream: IncomingStream) -> None:
        assert stream.first_token is not None, stream.key
        self._send(stream.link, KvGrant(*stream.key, stream.first_token, self._limits.window_bytes))

    def _accept(self, transfer: IncomingTransfer, link: bytes, heads: HeadRange, offer: KvOffer, now: float) -> None:
        """Takes an offer; a repeated one is answered again, in case a grant, a credit or KV was lost."""
        if offer.num_tokens != transfer.num_tokens:
            reason = f"{offer.num_tokens} tokens offered, {transfer.num_tokens} expected"
            self._send(link, KvRevoke(*transfer.key, reason=reason))
            self._fail(transfer, reason, but=link)
            return
        stream = transfer.streams.get(link)
        if stream is None:
            transfer.add_stream(link, heads, now)
            if transfer.is_offered:
                self._report(KvOffered(transfer.key))
            return
        stream.last_sign = now
        if stream.first_token is not None:
            self._say_grant(stream)
            self._intake.on_repeated_offer(stream, offer)

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
        else:
            self._on_transfer_message(transfer, link, message, body, now)

    def _on_hello(self, link: bytes, hello: KvHello, now: float) -> None:
        fault = self._peers.introduce(link, hello, now)
        if fault is not None:
            line = f"prefill worker {hello.worker_id} refused: {fault}"
            self._lines.say_of_stranger(logging.ERROR, worker_of(link.decode("utf-8", "replace")), line, now)
            self._send(link, Refused(fault[:MAX_TEXT_CHARS]))
            return
        self._end_former_transfers((hello.worker_id, hello.generation), link)
        self._lines.say(logging.INFO, hello.worker_id, f"prefill worker {hello.worker_id} is connected", now)
        self._send(link, KvWelcome(self._generation, wire_dtypes=(FP8,)))

    def _end_former_transfers(self, peer: PeerId, link: bytes) -> None:
        """A worker dials anew after a restart or on a new link: what it had offered before will never come."""
        heads = self._peers.heads_on(link)
        for transfer in self._book:
            if transfer.peer[0] == peer[0] and (transfer.peer != peer or transfer.has_stream_for(heads)):
                self._fail(transfer, "the prefill worker was restarted or dialled anew", but=link)

    def _on_offer(self, link: bytes, peer: PeerId, offer: KvOffer, now: float) -> None:
        key, heads = (offer.request_id, offer.attempt), self._peers.heads_on(link)
        ended = self._book.ended(key)
        if (transfer := self._book.find(key, peer)) is not None:
            try:
                self._accept(transfer, link, heads, offer, now)
            except LossError as error:
                self._lose(transfer, error, now)
        elif ended is ReceptionOutcome.ARRIVED:
            self._send(link, KvDone(*key))
        elif ended is not None:
            self._send(link, KvRevoke(*key, reason="no longer wanted"))
        else:
            self._park(key, ParkedOffer(peer, link, heads, offer.num_tokens, now))

    def _park(self, key: RequestKey, offer: ParkedOffer) -> None:
        """Whose offers have to make room is told, unless they were withdrawn already."""
        for evicted_key, evicted in self._book.park(key, offer):
            if evicted.abort_reason is None:
                self._send(evicted.link, KvRevoke(*evicted_key, reason="too many offers wait for a reservation"))

    def _on_stray(self, link: bytes, peer: PeerId, message: KvHeader | KvFirstToken | KvAbort, now: float) -> None:
        """Something for an attempt that is over, or was never ours: dropped and counted. An abort may also have
        overtaken the reservation, which then must not wait for KV."""
        key = (message.request_id, message.attempt)
        if isinstance(message, KvAbort) and self._book.ended(key) is None:
            self._park(key, ParkedOffer(peer, link, self._peers.heads_on(link), 0, now, message.reason))
        else:
            self.num_dropped += 1

    def _on_transfer_message(
        self,
        transfer: IncomingTransfer,
        link: bytes,
        message: KvHeader | KvFirstToken | KvAbort,
        body: KvBody | None,
        now: float,
    ) -> None:
        if isinstance(message, KvAbort):
            self._ends.end(transfer.key, ReceptionOutcome.ABORTED, message.reason, but=link)
            return
        stream = transfer.streams.get(link)
        if stream is None or stream.first_token is None:
            raise ProtocolError("KV that was not offered on this link, or before its grant")
        stream.last_sign = now
        try:
            if body is None:
                assert isinstance(message, KvFirstToken), message
                self._on_first_token(transfer, stream, message)
            else:
                assert isinstance(message, KvHeader), message
                self._ends.note_frame(transfer.key, now)
                self._intake.take(stream, message, body)
        except LossError as error:
            self._lose(transfer, error, now)

    def _on_first_token(self, transfer: IncomingTransfer, stream: IncomingStream, message: KvFirstToken) -> None:
        for token_id in (message.token_id, *(drawn.token_id for drawn in message.siblings.values())):
            if token_id >= self._vocab_size:
                raise ProtocolError(f"first token {token_id} of {self._vocab_size}")
        self._intake.on_first_token(stream, message)
        if transfer.has_arrived:
            self._ends.arrived(transfer)

    def _lose(self, transfer: IncomingTransfer, error: LossError, now: float) -> None:
        """Losses beyond what is sent again cost the transfer; the link is as good as before."""
        line = f"KV of {transfer.key} from {transfer.peer[0]}: {error}"
        self._loss_lines.say(logging.ERROR, transfer.peer[0], line, now)
        self._fail(transfer, str(error))

    def _fail(self, transfer: IncomingTransfer, reason: str, but: bytes | None = None) -> None:
        self._ends.end(transfer.key, ReceptionOutcome.FAILED, reason, but=but)

    def _drop_peer(self, link: bytes, reason: str, now: float) -> None:
        """A breach of protocol costs the sender its link, and the transfers on it; nobody else anything.

        What was on its way behind the breach, and strangers' noise, is counted and not logged.
        """
        peer = self._peers.forget(link)
        self._send(link, Refused("the link broke the protocol", again=True))
        if peer is None:
            self.num_dropped += 1
            return
        self._lines.say(logging.ERROR, peer[0], f"KV peer {peer[0]} broke the protocol: {reason}", now)
        for transfer in self._book:
            if transfer.peer == peer:
                self._fail(transfer, "the prefill worker broke the protocol", but=link)

    def sweep(self, now: float) -> None:
        if now < self._next_sweep:
            return
        self._next_sweep = now + self.sweep_interval
        self._lines.on_tick(now)
        self._loss_lines.on_tick(now)
        self._peers.forget_idle(now - IDLE_LEASES * self._limits.lease, {transfer.peer for transfer in self._book})
        for transfer in self._book.silent_since(now - self._limits.lease):
            reason = f"nothing heard from the prefill worker for {self._limits.lease:g} s"
            self._ends.end(transfer.key, ReceptionOutcome.FAILED, reason, told="the lease ran out")
