"""What prefill still owes to decode: one record a transfer, advanced by pure methods. No socket, tensor or clock.

The tokens of one layer in one transfer:

    |<- decode has -->|<---- shipped ---->|<-- shippable -->|<- not computed yet ->|
    0            first_token          shipped[l]         ready[l]             num_tokens

Bytes in flight (sent, not credited) never exceed the grant's window, except that one token may always be in flight: a
window smaller than a token would stall the transfer. A layer that the receiver asks for again goes back to the token
that it names; what was sent behind that token stays in flight until it is credited, arrived or lost.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtransfer.codec import RequestKey
from kvtransfer.errors import ProtocolError
from kvtransfer.request_parts import Drawn, TokenLogprob


class TransferOutcome(Enum):
    """How a transfer ended."""

    DONE = "done"  # the other side has everything
    ABORTED = "aborted"  # this side gave it up
    REVOKED = "revoked"  # the other side no longer wants it
    FAILED = "failed"  # the link or the peer failed


@dataclass(frozen=True)
class TransferTimes:
    """Moments of a transfer that is done, seconds, monotonic: all KV was computed, the first frame went out (None:
    nothing had to be sent), the receiver said that it has everything.

    All three are readings of one clock, taken by the sender's thread: from `ready_at` to `taken_at` is what the
    transfer adds to the request, the way of the receiver's last word included. Two hosts' clocks are never compared.
    """

    ready_at: float
    started_at: float | None
    taken_at: float


@dataclass(frozen=True)
class TransferEnded:
    """The sender will not touch the request's blocks again. `times` may be set if the outcome is DONE."""

    key: RequestKey
    outcome: TransferOutcome
    reason: str = ""
    times: TransferTimes | None = None


class Piece(NamedTuple):
    """Tokens [start, stop) of layers [layer, layer + num_layers): what goes into one message, in `dtype` (None: the
    pool's own). One a message is made, so it has to be cheap."""

    layer: int
    start: int
    stop: int
    dtype: str | None = None
    num_layers: int = 1


@dataclass(slots=True)
class OutgoingTransfer:
    """One transfer's books. `first_token_id` is set once prefill has sampled, and `first_logprob` if somebody asked for
    it; they go out behind the last piece, with those of the other choices (`siblings`, by request id)."""

    key: RequestKey
    num_tokens: int
    num_layers: int
    piece_bytes_per_token: int  # K and V together, one layer
    max_piece_tokens: int
    wire_dtype: str | None = None  # None: the pool's own
    together_bytes: int = 0  # of several layers in one piece
    offered: bool = False
    first_token: int | None = None  # None: not granted
    window_bytes: int = 0
    sent_bytes: int = 0
    credited_bytes: int = 0
    num_resends: int = 0  # number of the last KvResend that was heard
    first_token_id: int | None = None
    first_logprob: TokenLogprob | None = None
    siblings: Mapping[str, Drawn] = field(default_factory=dict)
    first_token_sent: bool = False
    heard_at: float | None = None  # when the receiver last spoke of it; None while prefill still computes
    ready_at: float | None = None  # seconds, monotonic, as those around
    started_at: float | None = None
    _probed_bytes: int = -1  # what was credited at the last probe
    _num_unshipped: int = 0  # tokens, over all layers, once granted
    _ready: list[int] = field(default_factory=list)
    _shipped: list[int] = field(default_factory=list)
    # Heap of (shipped, layer): every layer with something to ship, and entries that later shipments have outdated.
    _waiting: list[tuple[int, int]] = field(default_factory=list)
    _resends: list[int] = field(default_factory=list)  # for each layer, number of the last KvResend that was heard

    def __post_init__(self) -> None:
        self._ready = [0] * self.num_layers
        self._shipped = [0] * self.num_layers
        self._resends = [0] * self.num_layers

    def pack(self, wire_dtype: str, piece_bytes_per_token: int, max_piece_tokens: int) -> None:
        """The receiver takes KV in another dtype than the pool's: so it goes out, unless it is granted already."""
        if self.first_token is None:
            self.wire_dtype = wire_dtype
            self.piece_bytes_per_token, self.max_piece_tokens = piece_bytes_per_token, max_piece_tokens

    def grant(self, first_token: int, window_bytes: int) -> None:
        """The receiver has room from `first_token` on. A repeated grant answers a repeated offer: the receiver does
        not have everything yet, so the first token may have been lost."""
        if first_token > self.num_tokens:
            raise ProtocolError(f"grant from token {first_token} of {self.num_tokens}")
        if self.first_token is None:
            self.first_token, self.window_bytes = first_token, window_bytes
            self._shipped = [first_token] * self.num_layers
            self._num_unshipped = (self.num_tokens - first_token) * self.num_layers
            self._waiting = [
                (first_token, layer) for layer in range(self.num_layers) if self._ready[layer] > first_token
            ]
        self.first_token_sent = False

    def credit(self, settled_bytes: int) -> None:
        """So many bytes in all are no longer on their way. Credits may be repeated or late, never ahead."""
        if settled_bytes > self.sent_bytes:
            raise ProtocolError(f"credit for {settled_bytes} bytes, {self.sent_bytes} sent")
        self.credited_bytes = max(self.credited_bytes, settled_bytes)

    def resend(self, layer: int, start: int, number: int) -> int:
        """The receiver misses `layer` from token `start` on: the bytes that will go out again. Repeated or overtaken
        words change nothing."""
        if self.first_token is None or layer >= self.num_layers:
            raise ProtocolError(f"resend of layer {layer} of {self.num_layers}, granted from {self.first_token}")
        if number <= self._resends[layer]:
            return 0
        if not self.first_token <= start <= self._shipped[layer]:
            raise ProtocolError(f"resend of layer {layer} from token {start}, {self._shipped[layer]} were sent")
        num_tokens = self._shipped[layer] - start
        self._shipped[layer], self._resends[layer] = start, number
        self._num_unshipped += num_tokens
        self.num_resends = max(self.num_resends, number)
        self.first_token_sent = False
        if self._is_waiting(layer):
            heapq.heappush(self._waiting, (start, layer))
        return num_tokens * self.piece_bytes_per_token

    def is_stuck(self) -> bool:
        """Whether bytes are in flight, and none has been credited since this was asked last."""
        was_credited, self._probed_bytes = self._probed_bytes, self.credited_bytes
        return self.in_flight_bytes > 0 and was_credited == self.credited_bytes

    def is_silent_since(self, moment: float) -> bool:
        """Whether the receiver has had its turn, and has said nothing since `moment`."""
        return self.heard_at is not None and self.heard_at < moment

    def resend_of(self, layer: int) -> int:
        """Number of the last KvResend that was heard for `layer`, 0 if none."""
        return self._resends[layer]

    def mark_ready(self, layer: int, stop: int) -> None:
        """KV of tokens [0, stop) of `layer` is in the pool."""
        assert self._ready[layer] <= stop <= self.num_tokens, (self._ready[layer], stop, self.num_tokens)
        if self.first_token is not None and self._ready[layer] <= self._shipped[layer] < stop:
            heapq.heappush(self._waiting, (self._shipped[layer], layer))
        self._ready[layer] = stop

    def _is_waiting(self, layer: int) -> bool:
        return self._shipped[layer] < self._ready[layer]

    def times(self, taken_at: float) -> TransferTimes | None:
        """The moments of a transfer that the receiver says it has all of; None if it says so too soon."""
        return None if self.ready_at is None else TransferTimes(self.ready_at, self.started_at, taken_at)

    @property
    def in_flight_bytes(self) -> int:
        return self.sent_bytes - self.credited_bytes

    @property
    def all_shipped(self) -> bool:
        return self.first_token is not None and self._num_unshipped == 0

    @property
    def is_waiting(self) -> bool:
        """Whether something may be ready to ship. False before the grant: until then nothing is in the heap."""
        return bool(self._waiting)

    def next_piece(self) -> Piece | None:
        """The next thing to ship, the chunk that has waited longest first, or None while nothing may go."""
        waiting = self._waiting
        while waiting:
            start, layer = waiting[0]
            if start == self._shipped[layer]:
                allowed = self._tokens_allowed()
                stop = min(self._ready[layer], start + allowed)
                num_layers = self._layers_together(layer, start, stop)
                return Piece(layer, start, stop, self.wire_dtype, num_layers) if allowed else None
            heapq.heappop(waiting)
        return None

    def _tokens_allowed(self) -> int:
        in_flight = self.sent_bytes - self.credited_bytes
        room = (self.window_bytes - in_flight) // self.piece_bytes_per_token
        alone = 1 if in_flight == 0 else 0
        return min(self.max_piece_tokens, max(room, alone))

    def _layers_together(self, first: int, start: int, stop: int) -> int:
        """Layers from `first` on of which tokens [start, stop) may go in one piece. What was asked for again goes layer
        by layer: each has a number of its own."""
        room = min(self.together_bytes, self.window_bytes - self.in_flight_bytes)
        most = min(room // max(1, (stop - start) * self.piece_bytes_per_token), self.num_layers - first)
        if most < 2 or self._resends[first]:
            return 1
        shipped, ready, resends = self._shipped, self._ready, self._resends
        layer = first + 1
        while layer < first + most and shipped[layer] == start and ready[layer] >= stop and not resends[layer]:
            layer += 1
        return layer - first

    def shipped(self, piece: Piece) -> int:
        """`piece` has been handed to the socket; returns its bytes."""
        first, start, stop, _, num_layers = piece
        for layer in range(first, first + num_layers):
            assert self._shipped[layer] == start, (self._shipped[layer], piece)
            self._shipped[layer] = stop
            if stop < self._ready[layer]:
                heapq.heappush(self._waiting, (stop, layer))
        num_tokens = (stop - start) * num_layers
        self._num_unshipped -= num_tokens
        self.sent_bytes += num_tokens * self.piece_bytes_per_token
        return num_tokens * self.piece_bytes_per_token


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
