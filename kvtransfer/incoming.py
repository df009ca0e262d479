"""What decode has received of the KV that it expects: one record a transfer. No socket, tensor or clock.

The tokens of one layer in one transfer; a link keeps the order, so anything but the next token is a breach:

    |<- in our pool before -->|<-- spliced -->|<- next frame ->|
    0                    first_token       next[l]          num_tokens
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.errors import ProtocolError
from kvtransfer.messages import KvHeader, RequestKey

PeerId = tuple[str, str]
"""(worker_id, generation) of a prefill worker."""

MAX_PARKED_OFFERS = 4096
MAX_REMEMBERED = 1024


class ReceptionOutcome(Enum):
    """How the reception of a transfer ended."""

    ARRIVED = "arrived"  # all KV is in the pool and the first token is known
    CLOSED = "closed"  # the engine no longer wanted it
    ABORTED = "aborted"  # prefill gave it up
    FAILED = "failed"  # a breach of protocol, or silence beyond the lease


@dataclass(frozen=True)
class KvOffered:
    """Prefill holds blocks for the request and offers its KV: from here on its silence counts."""

    key: RequestKey


@dataclass(frozen=True)
class ReceptionEnded:
    """The receiver will not touch the request's blocks again. `first_token_id` is set if the outcome is ARRIVED."""

    key: RequestKey
    outcome: ReceptionOutcome
    first_token_id: int | None = None
    first_frame_at: float | None = None  # monotonic seconds
    reason: str = ""


@dataclass
class IncomingTransfer:
    """One reception's books: expected, offered (`link`), granted (`first_token`). `last_sign` is the last time the peer
    spoke of it, seconds."""

    key: RequestKey
    peer: PeerId
    num_tokens: int
    num_layers: int
    last_sign: float
    link: bytes | None = None  # None: not offered yet
    first_token: int | None = None  # None: not granted yet
    spliced_bytes: int = 0
    credited_bytes: int = 0
    first_token_id: int | None = None
    _next: list[int] = field(default_factory=list)
    _missing: int = 0  # tokens, over all layers; counts once granted

    def grant(self, first_token: int) -> None:
        """Blocks are reserved, and the tokens before `first_token` are in the pool."""
        assert self.link is not None, f"{self.key} was granted before it was offered"
        assert self.first_token is None, f"{self.key} was granted twice"
        assert 0 <= first_token <= self.num_tokens, (first_token, self.num_tokens)
        self.first_token = first_token
        self._next = [first_token] * self.num_layers
        self._missing = (self.num_tokens - first_token) * self.num_layers

    def check(self, header: KvHeader) -> None:
        """Raises ProtocolError unless `header` is what must come next for its layer."""
        if self.first_token is None:
            raise ProtocolError("KV came before its grant")
        expected = self._next[header.layer]
        if header.start != expected or header.stop > self.num_tokens:
            raise ProtocolError(
                f"layer {header.layer}: tokens [{header.start}, {header.stop}), expected from {expected}"
                f" up to {self.num_tokens}"
            )

    def spliced(self, header: KvHeader, num_bytes: int) -> None:
        """The tokens of `header`, `num_bytes` of K and V, are in the pool."""
        self._next[header.layer] = header.stop
        self._missing -= header.stop - header.start
        self.spliced_bytes += num_bytes

    @property
    def uncredited_bytes(self) -> int:
        return self.spliced_bytes - self.credited_bytes

    @property
    def has_all_kv(self) -> bool:
        return self.first_token is not None and self._missing == 0


@dataclass(frozen=True)
class ParkedOffer:
    """An offer that came before the request it is for, and perhaps was withdrawn since (`abort_reason`)."""

    peer: PeerId
    link: bytes
    num_tokens: int
    seen_at: float
    abort_reason: str | None = None


class IncomingBook:
    """All receptions of one decode worker, offers that wait for one, and how the latest ones ended."""

    def __init__(self) -> None:
        self._transfers: dict[RequestKey, IncomingTransfer] = {}
        self._parked: OrderedDict[tuple[RequestKey, PeerId], ParkedOffer] = OrderedDict()
        self._ended: OrderedDict[RequestKey, ReceptionOutcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[IncomingTransfer]:
        return iter(list(self._transfers.values()))

    def open(self, transfer: IncomingTransfer) -> ParkedOffer | None:
        """Adds a reception; returns the offer that has come for it already, if any."""
        assert transfer.key not in self._transfers, transfer.key
        self._transfers[transfer.key] = transfer
        return self._parked.pop((transfer.key, transfer.peer), None)

    def find(self, key: RequestKey, peer: PeerId) -> IncomingTransfer | None:
        """The open reception `key` if it is `peer`'s to fill."""
        transfer = self._transfers.get(key)
        return transfer if transfer is not None and transfer.peer == peer else None

    def get(self, key: RequestKey) -> IncomingTransfer | None:
        return self._transfers.get(key)

    def park(self, key: RequestKey, offer: ParkedOffer) -> tuple[RequestKey, ParkedOffer] | None:
        """Keeps an offer until its request comes; if there are too many, the oldest one goes and is returned."""
        self._parked[key, offer.peer] = offer
        self._parked.move_to_end((key, offer.peer))
        if len(self._parked) <= MAX_PARKED_OFFERS:
            return None
        (evicted_key, _), evicted = self._parked.popitem(last=False)
        return evicted_key, evicted

    def ended(self, key: RequestKey) -> ReceptionOutcome | None:
        """How `key` ended, if it did so lately."""
        return self._ended.get(key)

    def close(self, key: RequestKey, outcome: ReceptionOutcome) -> IncomingTransfer | None:
        """Ends a reception and returns it; None if it is not open."""
        transfer = self._transfers.pop(key, None)
        if transfer is not None:
            self._ended[key] = outcome
            if len(self._ended) > MAX_REMEMBERED:
                self._ended.popitem(last=False)
        return transfer

    def silent_since(self, moment: float) -> list[IncomingTransfer]:
        """Offered receptions whose peer has not been heard of since `moment`; stale parked offers are forgotten."""
        for name in [name for name, offer in self._parked.items() if offer.seen_at < moment]:
            del self._parked[name]
        return [
            transfer
            for transfer in self._transfers.values()
            if transfer.link is not None and transfer.last_sign < moment
        ]
