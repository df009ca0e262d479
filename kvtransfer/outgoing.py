"""What prefill still owes to decode: one record a transfer, advanced by pure methods. No socket, tensor or clock.

The tokens of one layer in one transfer:

    |<- decode has -->|<---- shipped ---->|<-- shippable -->|<- not computed yet ->|
    0            first_token          shipped[l]         ready[l]             num_tokens

Bytes in flight (shipped, not credited) never exceed the grant's window, except that one token may always be in
flight: a window smaller than a token would stall the transfer.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtransfer.errors import ProtocolError
from kvtransfer.messages import RequestKey


class TransferOutcome(Enum):
    """How a transfer ended."""

    DONE = "done"  # the other side has everything
    ABORTED = "aborted"  # this side gave it up
    REVOKED = "revoked"  # the other side no longer wants it
    FAILED = "failed"  # the link or the peer failed


@dataclass(frozen=True)
class TransferEnded:
    """The sender will not touch the request's blocks again."""

    key: RequestKey
    outcome: TransferOutcome
    reason: str = ""


class Piece(NamedTuple):
    """Tokens [start, stop) of one layer: what goes into one message. One a message is made, so it has to be cheap."""

    layer: int
    start: int
    stop: int


@dataclass
class OutgoingTransfer:
    """One transfer's books. `first_token_id` is set once prefill has sampled; it goes out behind the last piece."""

    key: RequestKey
    num_tokens: int
    num_layers: int
    piece_bytes_per_token: int  # K and V together, one layer
    max_piece_tokens: int
    offered: bool = False
    first_token: int | None = None  # None: not granted
    window_bytes: int = 0
    sent_bytes: int = 0
    credited_bytes: int = 0
    first_token_id: int | None = None
    first_token_sent: bool = False
    _ready: list[int] = field(default_factory=list)
    _shipped: list[int] = field(default_factory=list)
    # Heap of (shipped, layer): every layer with something to ship, and entries that later shipments have outdated.
    _waiting: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ready = [0] * self.num_layers
        self._shipped = [0] * self.num_layers

    def grant(self, first_token: int, window_bytes: int) -> None:
        """The receiver has room from `first_token` on. A repeated grant changes nothing."""
        if first_token > self.num_tokens:
            raise ProtocolError(f"grant from token {first_token} of {self.num_tokens}")
        if self.first_token is None:
            self.first_token, self.window_bytes = first_token, window_bytes
            self._shipped = [first_token] * self.num_layers
            self._waiting = [
                (first_token, layer) for layer in range(self.num_layers) if self._ready[layer] > first_token
            ]

    def credit(self, spliced_bytes: int) -> None:
        """The receiver has spliced so many bytes in all. Credits may be repeated or late, never ahead."""
        if spliced_bytes > self.sent_bytes:
            raise ProtocolError(f"credit for {spliced_bytes} bytes, {self.sent_bytes} sent")
        self.credited_bytes = max(self.credited_bytes, spliced_bytes)

    def mark_ready(self, layer: int, stop: int) -> None:
        """KV of tokens [0, stop) of `layer` is in the pool."""
        assert self._ready[layer] <= stop <= self.num_tokens, (self._ready[layer], stop, self.num_tokens)
        was_waiting = self._is_waiting(layer)
        self._ready[layer] = stop
        if self.first_token is not None and self._is_waiting(layer) and not was_waiting:
            heapq.heappush(self._waiting, (self._shipped[layer], layer))

    def _is_waiting(self, layer: int) -> bool:
        return self._shipped[layer] < self._ready[layer]

    @property
    def in_flight_bytes(self) -> int:
        return self.sent_bytes - self.credited_bytes

    @property
    def all_shipped(self) -> bool:
        return self.first_token is not None and all(shipped == self.num_tokens for shipped in self._shipped)

    def next_piece(self) -> Piece | None:
        """The next thing to ship, the chunk that has waited longest first, or None while nothing may go."""
        layer, allowed = self._longest_waiting_layer(), self._tokens_allowed()
        if layer is None or allowed == 0:
            return None
        start = self._shipped[layer]
        return Piece(layer, start, min(self._ready[layer], start + allowed))

    def _longest_waiting_layer(self) -> int | None:
        """None before the grant too: until then nothing is in the heap."""
        while self._waiting:
            shipped, layer = self._waiting[0]
            if shipped == self._shipped[layer]:
                return layer
            heapq.heappop(self._waiting)
        return None

    def _tokens_allowed(self) -> int:
        room = (self.window_bytes - self.in_flight_bytes) // self.piece_bytes_per_token
        alone = 1 if self.in_flight_bytes == 0 else 0
        return min(self.max_piece_tokens, max(room, alone))

    def shipped(self, piece: Piece) -> None:
        """`piece` has been handed to the socket."""
        assert self._shipped[piece.layer] == piece.start, (self._shipped[piece.layer], piece)
        self._shipped[piece.layer] = piece.stop
        self.sent_bytes += (piece.stop - piece.start) * self.piece_bytes_per_token
        if self._is_waiting(piece.layer):
            heapq.heappush(self._waiting, (piece.stop, piece.layer))


class OutgoingBook:
    """All transfers of one prefill worker, oldest first."""

    def __init__(self) -> None:
        self._transfers: dict[RequestKey, OutgoingTransfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[OutgoingTransfer]:
        return iter(list(self._transfers.values()))

    def open(self, transfer: OutgoingTransfer) -> None:
        assert transfer.key not in self._transfers, transfer.key
        self._transfers[transfer.key] = transfer

    def find(self, key: RequestKey) -> OutgoingTransfer | None:
        return self._transfers.get(key)

    def close(self, key: RequestKey) -> OutgoingTransfer | None:
        """Forgets a transfer and returns it; None if it is closed already."""
        return self._transfers.pop(key, None)
