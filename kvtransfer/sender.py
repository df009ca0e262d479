"""Prefill's end of the KV hand-over, in a thread of its own.

1. The engine opens a transfer; the sender dials the decode worker if it must (KvHello) and offers it (KvOffer).
2. While the engine computes, it reports layer after layer as ready. Whatever is granted (KvGrant) is gathered from the
   pool and shipped, oldest transfer first, never more than the window ahead of the receiver's credits (KvCredit).
3. The sampled first token goes behind the last piece (KvFirstToken); the receiver answers KvDone.
4. However a transfer ends, the engine gets exactly one TransferEnded, after the last read of the request's blocks: only
   then may it free them.

Offers are repeated every `keepalive` seconds while a transfer is open; each renews the receiver's lease. A link that
nothing was sent on for IDLE_KEEPALIVES of them is hung up, and a refusal at its handshake forgotten with it.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtransfer.channel import KvBody, KvDialer
from kvtransfer.errors import MessageError, ProtocolError, SettingsError
from kvtransfer.layout import max_frame_tokens, token_bytes
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    DecodeTarget,
    DecodeToPrefill,
    KvAbort,
    KvCredit,
    KvDone,
    KvFirstToken,
    KvGrant,
    KvHeader,
    KvHello,
    KvOffer,
    KvRevoke,
    KvWelcome,
    Refused,
    RequestKey,
)
from kvtransfer.outgoing import OutgoingBook, OutgoingTransfer, Piece, TransferEnded, TransferOutcome

logger = logging.getLogger(__name__)

PIECES_A_TURN = 16
"""Pieces shipped before the sender looks at its sockets and its commands again."""
IDLE_KEEPALIVES = 4


class KvSource(Protocol):
    """Where KV is read from: the prefill worker's pool."""

    def gather(self, key: RequestKey, piece: Piece) -> KvBody:
        """K and V of one layer for tokens [start, stop), each [tokens, num_kv_heads, head_dim], contiguous bytes."""
        ...


@dataclass(frozen=True)
class _Open:
    key: RequestKey
    target: DecodeTarget
    num_tokens: int


@dataclass(frozen=True)
class _Ready:
    layer: int
    stops: tuple[tuple[RequestKey, int], ...]


@dataclass(frozen=True)
class _FirstToken:
    key: RequestKey
    token_id: int


@dataclass(frozen=True)
class _Abort:
    key: RequestKey
    reason: str
    tell_peer: bool


@dataclass(frozen=True)
class _Stop:
    pass


_Command = _Open | _Ready | _FirstToken | _Abort | _Stop


@dataclass
class _Peer:
    target: DecodeTarget
    used_at: float  # monotonic seconds
    is_welcome: bool = False
    refusal: str | None = None


@dataclass
class KvSender:
    """Ships KV of this prefill worker to decode workers. `events` takes what the engine has to know."""

    hello: KvHello
    source: KvSource
    events: Mailbox[Any]
    keepalive: float  # seconds
    _commands: Mailbox[_Command] = field(default_factory=Mailbox)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self._dialer = KvDialer(f"{self.hello.worker_id}/{self.hello.generation}")
        self._book = OutgoingBook()
        self._peer_of: dict[RequestKey, str] = {}
        self._peers: dict[str, _Peer] = {}
        self._aborts: list[tuple[str, KvAbort]] = []  # to be said as soon as the peer's queue has room
        self._next_keepalive = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)

    # --- for the engine's thread

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the sender still runs: without it the engine must stop."""
        return self._thread.is_alive()

    def open(self, key: RequestKey, target: DecodeTarget, num_tokens: int) -> None:
        """Offers a request's KV to `target`."""
        self._commands.put(_Open(key, target, num_tokens))

    def ready(self, layer: int, stops: Sequence[tuple[RequestKey, int]]) -> None:
        """KV of tokens [0, stop) of `layer` is in the pool, for each (key, stop)."""
        self._commands.put(_Ready(layer, tuple(stops)))

    def first_token(self, key: RequestKey, token_id: int) -> None:
        """The prompt is computed and its first token sampled."""
        self._commands.put(_FirstToken(key, token_id))

    def abort(self, key: RequestKey, reason: str, *, tell_peer: bool) -> None:
        """Gives a transfer up; answered by TransferEnded unless it has ended already."""
        self._commands.put(_Abort(key, reason, tell_peer))

    def stop(self, timeout: float = 2.0) -> None:
        self._commands.put(_Stop())
        self._thread.join(timeout)

    # --- the thread

    def _run(self) -> None:
        self._dialer.watch(self._commands)
        more = False
        while not self._stopping:
            self._dialer.poll(0.0 if more else self.keepalive / 4)
            for command in self._commands.drain():
                self._apply(command)
            for peer, message in self._dialer.receive():
                self._on_message(peer, message)
            self._keep_alive(time.monotonic())
            self._send_aborts()
            more = self._ship()
        self._dialer.close()

    def _apply(self, command: _Command) -> None:
        match command:
            case _Open():
                self._open(command)
            case _Ready(layer, stops):
                for key, stop in stops:
                    if transfer := self._book.find(key):
                        transfer.mark_ready(layer, stop)
            case _FirstToken(key, token_id):
                if transfer := self._book.find(key):
                    transfer.first_token_id = token_id
            case _Abort(key, reason, tell_peer):
                if tell_peer and self._book.find(key):
                    self._aborts.append((self._peer_of[key], KvAbort(*key, reason=reason)))
                self._end(key, TransferOutcome.ABORTED, reason)
            case _Stop():
                self._stopping = True

    def _open(self, command: _Open) -> None:
        layout = self.hello.layout
        refusal = self._dial(command.target, time.monotonic())
        self._peer_of[command.key] = command.target.worker_id
        self._book.open(
            OutgoingTransfer(
                key=command.key,
                num_tokens=command.num_tokens,
                num_layers=layout.num_layers,
                piece_bytes_per_token=2 * token_bytes(layout),
                max_piece_tokens=max_frame_tokens(layout),
            )
        )
        if refusal is not None:
            self._end(command.key, TransferOutcome.FAILED, refusal)

    def _dial(self, target: DecodeTarget, now: float) -> str | None:
        """Opens a link to `target` if there is none, and returns why it takes no KV, if so. A new generation replaces
        the old one's link."""
        peer = self._peers.get(target.worker_id)
        if peer is not None and peer.target == target:
            peer.used_at = peer.used_at if peer.refusal else now
            return peer.refusal
        if peer is not None:
            self._drop_peer(target.worker_id, "the decode worker was restarted")
        try:
            self._dialer.dial(target.worker_id, target.kv_endpoint)
        except SettingsError as error:
            logger.error("decode worker %s: %s", target.worker_id, error)
            return "the decode worker's KV address cannot be dialled"
        self._dialer.send(target.worker_id, self.hello)
        self._peers[target.worker_id] = _Peer(target, now)
        return None

    def _drop_peer(self, name: str, reason: str) -> None:
        self._fail_all(name, reason)
        self._dialer.hang_up(name)
        del self._peers[name]

    def _fail_all(self, name: str, reason: str) -> None:
        for key in [key for key, peer in self._peer_of.items() if peer == name]:
            self._end(key, TransferOutcome.FAILED, reason)

    def _on_message(self, name: str, message: DecodeToPrefill | MessageError) -> None:
        if name not in self._peers:
            return  # dropped a moment ago
        try:
            self._handle(name, message)
        except ProtocolError as error:
            logger.error("decode worker %s broke the protocol, closing the link: %s", name, error)
            self._drop_peer(name, "the decode worker broke the protocol")

    def _handle(self, name: str, message: DecodeToPrefill | MessageError) -> None:
        match message:
            case MessageError():
                raise message
            case KvWelcome(generation):
                self._on_welcome(name, generation)
            case Refused(reason):
                self._on_refused(name, reason)
            case KvGrant(request_id, attempt, first_token, window_bytes):
                if transfer := self._find(name, (request_id, attempt)):
                    transfer.grant(first_token, window_bytes)
            case KvCredit(request_id, attempt, spliced_bytes):
                if transfer := self._find(name, (request_id, attempt)):
                    transfer.credit(spliced_bytes)
            case KvDone(request_id, attempt):
                if self._find(name, (request_id, attempt)):
                    self._end((request_id, attempt), TransferOutcome.DONE)
            case KvRevoke(request_id, attempt, reason):
                if self._find(name, (request_id, attempt)):
                    self._end((request_id, attempt), TransferOutcome.REVOKED, reason)

    def _on_welcome(self, name: str, generation: str) -> None:
        """Behind the address may be another decode worker by now, which has no room reserved for what is meant for
        the one before."""
        peer = self._peers[name]
        if generation != peer.target.generation:
            logger.warning("decode worker %s is not the one that was meant: it was restarted", name)
            self._drop_peer(name, "the decode worker was restarted")
            return
        logger.info("KV link to %s is up", name)
        peer.is_welcome = True

    def _on_refused(self, name: str, reason: str) -> None:
        """At the handshake the first word holds; what follows answers what was sent behind KvHello. Later on, the
        other side has lost track of this link (it was cut, or its peer restarted): the next transfer dials anew."""
        peer = self._peers[name]
        if peer.refusal is not None:
            return
        logger.error("decode worker %s refused our KV: %s", name, reason)
        if peer.is_welcome:
            self._drop_peer(name, reason)
            return
        peer.refusal = reason
        self._fail_all(name, reason)

    def _find(self, name: str, key: RequestKey) -> OutgoingTransfer | None:
        """The transfer `key` if it is open and goes to `name`; late messages of ended ones find nothing."""
        return self._book.find(key) if self._peer_of.get(key) == name else None

    def _end(self, key: RequestKey, outcome: TransferOutcome, reason: str = "") -> None:
        if self._book.close(key) is not None:
            del self._peer_of[key]
            self.events.put(TransferEnded(key, outcome, reason))

    def _send_aborts(self) -> None:
        """To peers whose link is gone there is nothing left to say."""
        self._aborts = [
            (peer, abort) for peer, abort in self._aborts if peer in self._peers and not self._dialer.send(peer, abort)
        ]

    def _ship(self) -> bool:
        """Ships up to a turn's worth; True if there may be more to ship right away."""
        left = PIECES_A_TURN
        for transfer in self._book:
            peer = self._peer_of[transfer.key]
            if not transfer.offered:
                transfer.offered = self._dialer.send(peer, KvOffer(*transfer.key, num_tokens=transfer.num_tokens))
            while left and self._dialer.has_room(peer) and (piece := transfer.next_piece()):
                self._ship_piece(peer, transfer, piece)
                left -= 1
            self._ship_first_token(peer, transfer)
        return left == 0

    def _ship_piece(self, peer: str, transfer: OutgoingTransfer, piece: Piece) -> None:
        layout = self.hello.layout
        header = KvHeader(
            *transfer.key,
            layer=piece.layer,
            start=piece.start,
            stop=piece.stop,
            head_start=0,
            head_stop=layout.num_kv_heads,
            dtype=layout.dtype,
        )
        if self._dialer.send(peer, header, self.source.gather(transfer.key, piece)):
            transfer.shipped(piece)

    def _ship_first_token(self, peer: str, transfer: OutgoingTransfer) -> None:
        if transfer.first_token_sent or transfer.first_token_id is None or not transfer.all_shipped:
            return
        message = KvFirstToken(*transfer.key, token_id=transfer.first_token_id)
        transfer.first_token_sent = self._dialer.send(peer, message)

    def _keep_alive(self, now: float) -> None:
        if now < self._next_keepalive:
            return
        self._next_keepalive = now + self.keepalive
        for transfer in self._book:
            transfer.offered = False
        busy, idle_since = set(self._peer_of.values()), now - IDLE_KEEPALIVES * self.keepalive
        for name in [name for name, peer in self._peers.items() if peer.used_at < idle_since and name not in busy]:
            self._drop_peer(name, "idle")
