"""What prefill's end of the KV hand-over does with each command and message. No thread, socket or clock: frames leave
through a `KvOutlet`, `now` is seconds, monotonic. The thread around it is `kvtransfer/sender.py`.

Offers are repeated every `keepalive` seconds while a transfer is open, and sooner where nothing is credited; each
renews the receiver's lease, and a receiver that has granted one answers it. So a transfer may take as long as it needs,
but one whose first token is known and of which nothing is heard for a lease has failed. A link that was not used for
IDLE_KEEPALIVES keepalives is hung up, and a refusal at its handshake forgotten with it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtransfer.codec import RequestKey
from kvtransfer.errors import MessageError, ProtocolError
from kvtransfer.frames import PLAIN, FrameMaker, FrameOptions, first_token_of, offer_of
from kvtransfer.kv_messages import (
    DecodeToPrefill,
    KvAbort,
    KvCredit,
    KvDone,
    KvGrant,
    KvHello,
    KvResend,
    KvRevoke,
    KvWelcome,
)
from kvtransfer.layout import KvBody
from kvtransfer.messages import Refused
from kvtransfer.outgoing import OutgoingBook, OutgoingTransfer, Piece, TransferEnded, TransferOutcome, TransferTimes
from kvtransfer.send_commands import Abort, FirstToken, Open, Ready, SendCommand, SenderTiming
from kvtransfer.targets import KvOutlet, TargetBook
from kvtransfer.worker_facts import KvTraffic

TURN_BYTES = 8 << 20
PIECES_A_TURN = 64
"""What is shipped, at most, before the sender looks at its sockets and its commands again: milliseconds of work."""
IDLE_KEEPALIVES = 4
MAX_ABORTS = 1024
MAX_PROBE_S = 1.0


class KvSource(Protocol):
    """Where KV is read from: the prefill worker's pool."""

    def gather(self, key: RequestKey, piece: Piece) -> KvBody:
        """K and V of the piece's layers for tokens [start, stop), each [layers, tokens, KV heads, head_dim], contiguous
        bytes."""
        ...


class _Turn:
    """How much may go before the sender has to look up. `now`: seconds, monotonic."""

    __slots__ = ("_bytes_left", "_pieces_left", "is_over", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        self.is_over = False
        self._bytes_left, self._pieces_left = TURN_BYTES, PIECES_A_TURN

    def took(self, num_bytes: int) -> None:
        """A piece of so many bytes is gone."""
        self._bytes_left -= num_bytes
        self._pieces_left -= 1
        self.is_over = self._bytes_left <= 0 or self._pieces_left == 0


class SendMachine:
    """Ships KV of a prefill worker. `report` takes what the engine has to know."""

    def __init__(
        self,
        hello: KvHello,
        source: KvSource,
        outlet: KvOutlet,
        report: Callable[[TransferEnded], None],
        timing: SenderTiming,
        options: FrameOptions = PLAIN,
    ) -> None:
        self._hello = hello
        self._frames = FrameMaker(hello, options)
        self._source = source
        self._outlet = outlet
        self._report = report
        self._timing = timing
        self._book = OutgoingBook()
        self._peer_of: dict[RequestKey, str] = {}
        self._peers = TargetBook(hello, outlet, self._fail_all)
        # To be said as soon as the peer's queue has room. If there are too many, the oldest are forgotten: decode gives
        # those transfers up when its lease runs out.
        self._aborts: deque[tuple[str, KvAbort]] = deque(maxlen=MAX_ABORTS)
        self._next_keepalive = self._next_probe = 0.0
        self._sent_bytes = self._resent_bytes = 0

    def __len__(self) -> int:
        return len(self._book)

    @property
    def traffic(self) -> KvTraffic:
        """What has been sent, and what of it was asked for again."""
        return KvTraffic(self._sent_bytes, self._resent_bytes)

    def apply(self, command: SendCommand, now: float) -> None:
        match command:
            case Open():
                self._open(command, now)
            case Ready(layer, stops):
                self._mark_ready(layer, stops, now)
            case FirstToken() as first:
                if transfer := self._book.find(first.key):
                    transfer.first_token_id, transfer.first_logprob = first.token_id, first.logprob
                    transfer.heard_at = now
                    transfer.siblings = first.siblings
            case Abort(key, reason, tell_peer):
                self._give_up(key, TransferOutcome.ABORTED, reason, tell_peer=tell_peer)

    def _give_up(self, key: RequestKey, outcome: TransferOutcome, reason: str, *, tell_peer: bool) -> None:
        if tell_peer and self._book.find(key):
            self._aborts.append((self._peer_of[key], KvAbort(*key, reason=reason)))
        self._end(key, outcome, reason)

    def _mark_ready(self, layer: int, stops: Sequence[tuple[RequestKey, int]], now: float) -> None:
        is_last = layer == self._hello.layout.num_layers - 1  # layers are computed in order
        for key, stop in stops:
            if transfer := self._book.find(key):
                transfer.mark_ready(layer, stop)
                if is_last and stop == transfer.num_tokens:
                    transfer.ready_at = now

    def _open(self, command: Open, now: float) -> None:
        refusal = self._peers.dial(command.target, now)
        piece_bytes, max_tokens = self._frames.sizes()
        self._peer_of[command.key] = command.target.worker_id
        self._book.open(
            OutgoingTransfer(
                key=command.key,
                num_tokens=command.num_tokens,
                num_layers=self._hello.layout.num_layers,
                piece_bytes_per_token=piece_bytes,
                max_piece_tokens=max_tokens,
                together_bytes=self._frames.together_bytes,
            )
        )
        if refusal is not None:
            self._end(command.key, TransferOutcome.FAILED, refusal)

    def _fail_all(self, name: str, reason: str) -> None:
        for key in [key for key, peer in self._peer_of.items() if peer == name]:
            self._end(key, TransferOutcome.FAILED, reason)

    def on_message(self, name: str, message: DecodeToPrefill | MessageError, now: float) -> None:
        if name not in self._peers:
            return  # dropped a moment ago
        try:
            self._handle(name, message, now)
        except ProtocolError as error:
            self._peers.broke_off(name, error, now)

    def _handle(self, name: str, message: DecodeToPrefill | MessageError, now: float) -> None:
        match message:
            case MessageError():
                raise message
            case KvWelcome():
                self._peers.welcomed(name, message, self._frames.dtype_for(message), now)
            case Refused(reason, again):
                self._peers.refused(name, reason, now, again=again)
            case KvGrant(request_id, attempt, first_token, window_bytes):
                if transfer := self._heard_of(name, (request_id, attempt), now):
                    if wire_dtype := self._peers[name].wire_dtype:
                        transfer.pack(wire_dtype, *self._frames.sizes(wire_dtype))
                    transfer.grant(first_token, window_bytes)
            case KvCredit(request_id, attempt, settled_bytes):
                if transfer := self._heard_of(name, (request_id, attempt), now):
                    transfer.credit(settled_bytes)
            case KvResend(request_id, attempt, layer, start, number):
                if transfer := self._heard_of(name, (request_id, attempt), now):
                    self._resent_bytes += transfer.resend(layer, start, number)
            case KvDone(request_id, attempt):
                if transfer := self._heard_of(name, (request_id, attempt), now):
                    self._end(transfer.key, TransferOutcome.DONE, times=transfer.times(now))
            case KvRevoke(request_id, attempt, reason):
                if self._heard_of(name, (request_id, attempt), now):
                    self._end((request_id, attempt), TransferOutcome.REVOKED, reason)

    def _heard_of(self, name: str, key: RequestKey, now: float) -> OutgoingTransfer | None:
        """The transfer `key` if it is open and goes to `name`; late messages of ended ones find nothing."""
        transfer = self._book.find(key) if self._peer_of.get(key) == name else None
        if transfer is not None and transfer.heard_at is not None:
            transfer.heard_at = now
        return transfer

    def _end(
        self, key: RequestKey, outcome: TransferOutcome, reason: str = "", times: TransferTimes | None = None
    ) -> None:
        if self._book.close(key) is not None:
            del self._peer_of[key]
            self._report(TransferEnded(key, outcome, reason, times))

    def _send_aborts(self) -> None:
        """To peers whose link is gone there is nothing left to say."""
        for _ in range(len(self._aborts)):
            peer, abort = self._aborts.popleft()
            if peer in self._peers and not self._outlet.send(peer, abort):
                self._aborts.append((peer, abort))

    def ship(self, now: float) -> bool:
        """Aborts, keep-alives, and up to a turn's worth of KV; True if there may be more to ship right away."""
        self._send_aborts()
        self._keep_alive(now)
        self._probe(now)
        turn = _Turn(now)
        for transfer in self._book:
            if not transfer.offered:
                transfer.offered = self._outlet.send(self._peer_of[transfer.key], offer_of(transfer))
            if transfer.is_waiting and not turn.is_over:
                self._ship_pieces(transfer, turn)
            if transfer.first_token_id is not None and not transfer.first_token_sent and transfer.all_shipped:
                self._ship_first_token(transfer, transfer.first_token_id)
        return turn.is_over

    def _ship_pieces(self, transfer: OutgoingTransfer, turn: "_Turn") -> None:
        """Ships pieces until the turn is over, as long as the peer's queue takes them."""
        peer, piece = self._peer_of[transfer.key], transfer.next_piece()
        # Asked once: from then on a send that fails says it as well, at the price of one gather in vain.
        if piece is None or not self._outlet.has_room(peer):
            return
        while piece is not None and not turn.is_over and (num_bytes := self._ship_piece(peer, transfer, piece)):
            turn.took(num_bytes)
            if transfer.started_at is None:
                transfer.started_at = turn.now
            piece = transfer.next_piece()

    def _ship_piece(self, peer: str, transfer: OutgoingTransfer, piece: Piece) -> int:
        """Returns the bytes that the socket took: none if its queue is full."""
        body = self._source.gather(transfer.key, piece)
        if not self._outlet.send(peer, self._frames.header(transfer, piece, body), body):
            return 0
        num_bytes = transfer.shipped(piece)
        self._sent_bytes += num_bytes
        return num_bytes

    def _ship_first_token(self, transfer: OutgoingTransfer, token_id: int) -> None:
        sent = self._outlet.send(self._peer_of[transfer.key], first_token_of(transfer, token_id))
        transfer.first_token_sent = sent

    def _probe(self, now: float) -> None:
        """A whole window may be lost, and then nothing comes behind it that could tell: only another offer does."""
        if now < self._next_probe:
            return
        self._next_probe = now + min(MAX_PROBE_S, self._timing.keepalive)
        self._peers.on_tick(now)
        for transfer in self._book:
            if transfer.is_stuck():
                transfer.offered = False

    def _keep_alive(self, now: float) -> None:
        if now < self._next_keepalive:
            return
        self._next_keepalive = now + self._timing.keepalive
        self._peers.hang_up_idle(now - IDLE_KEEPALIVES * self._timing.keepalive, set(self._peer_of.values()))
        self._end_the_silent(now)  # behind the former: the link still has to take the abort
        for transfer in self._book:
            transfer.offered = False

    def _end_the_silent(self, now: float) -> None:
        reason = f"decode did not take the KV within {self._timing.lease:g} s"
        for transfer in self._book:
            if transfer.is_silent_since(now - self._timing.lease):
                self._give_up(transfer.key, TransferOutcome.FAILED, reason, tell_peer=True)
