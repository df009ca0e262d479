"""What decode has received of the KV that it expects: one record a transfer. No socket, tensor or clock.

A prefill worker may come with several links, one for each shard of its tensor parallelism; a link brings the same range
of KV heads in all transfers, and no two links of a worker share one. What has come on a link is `IncomingStream`'s:

              tokens first_token ................ num_tokens
    heads 0   |  link A: layers 0, 1, ...                  |
          :   |                                            |
          h   |  link B: layers 0, 1, ...                  |
          :   |                                            |
    num_heads
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.codec import RequestKey
from kvtransfer.errors import ProtocolError
from kvtransfer.request_parts import Drawn, TokenLogprob
from kvtransfer.stream import IncomingStream

PeerId = tuple[str, str]
"""(worker_id, generation) of a prefill worker."""
HeadRange = tuple[int, int]
"""KV heads [start, stop)."""

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
    """The receiver will not touch the request's blocks again. `first_token_id` is set if the outcome is ARRIVED, and
    `first_logprob` if prefill has said it; then `siblings` are those of the other choices, by request id."""

    key: RequestKey
    outcome: ReceptionOutcome
    first_token_id: int | None = None
    first_frame_at: float | None = None  # monotonic seconds
    reason: str = ""
    siblings: Mapping[str, Drawn] = field(default_factory=dict)
    first_logprob: TokenLogprob | None = None


@dataclass
class IncomingTransfer:
    """One reception's books: expected, offered by a stream for each of the peer's links, granted (`first_token`)."""

    key: RequestKey
    peer: PeerId
    num_tokens: int
    num_layers: int
    num_heads: int
    first_token: int | None = None  # None: not granted yet
    streams: dict[bytes, IncomingStream] = field(default_factory=dict)

    def add_stream(self, link: bytes, heads: HeadRange, now: float) -> None:
        """KV heads [heads[0], heads[1]) are offered on `link`. Raises ProtocolError if another link has one of them."""
        if self.first_token is not None or self.has_stream_for(heads):
            raise ProtocolError(f"KV heads {heads} of {self.key} are offered on another link already")
        self.streams[link] = IncomingStream(self.key, link, heads, self.num_tokens, self.num_layers, now)

    def has_stream_for(self, heads: HeadRange) -> bool:
        """Whether one of `heads` has been offered."""
        return any(overlap(heads, stream.heads) for stream in self.streams.values())

    @property
    def is_offered(self) -> bool:
        """All KV heads are offered. No two streams share one, so it is enough to count them."""
        return sum(stop - start for start, stop in (stream.heads for stream in self.streams.values())) == self.num_heads

    def grant(self, first_token: int) -> None:
        """Blocks are reserved, and the tokens before `first_token` are in the pool."""
        assert self.is_offered, f"{self.key} was granted before it was offered"
        self.first_token = first_token
        for stream in self.streams.values():
            stream.grant(first_token)

    @property
    def has_arrived(self) -> bool:
        """All KV heads of all tokens of all layers are in the pool, and each stream has said the first token."""
        return self.is_offered and all(
            stream.has_all_kv and stream.first_token_id is not None for stream in self.streams.values()
        )

    @property
    def first_token_id(self) -> int:
        """The first token, once it has arrived. Raises ProtocolError if streams disagree about it."""
        said = {stream.first_token_id for stream in self.streams.values()}
        also_said = {
            tuple(sorted((name, drawn.token_id) for name, drawn in stream.siblings.items()))
            for stream in self.streams.values()
        }
        token_id = said.pop()
        if said or token_id is None or len(also_said) > 1:
            raise ProtocolError(f"links of {self.peer[0]} disagree about the first token of {self.key}")
        return token_id

    @property
    def siblings(self) -> Mapping[str, Drawn]:
        """The first tokens of the other choices, once they have arrived, by request id."""
        return next(iter(self.streams.values())).siblings

    @property
    def first_logprob(self) -> TokenLogprob | None:
        """The first token's, from whichever stream has said it."""
        said = (stream.first_logprob for stream in self.streams.values())
        return next((logprob for logprob in said if logprob is not None), None)


def overlap(some: HeadRange, others: HeadRange) -> bool:
    return some[0] < others[1] and others[0] < some[1]


@dataclass(frozen=True)
class ParkedOffer:
    """An offer that came before the request it is for, and perhaps was withdrawn since (`abort_reason`)."""

    peer: PeerId
    link: bytes
    heads: HeadRange
    num_tokens: int
    seen_at: float
    abort_reason: str | None = None


_Offers = dict[HeadRange, ParkedOffer]


class IncomingBook:
    """All receptions of one decode worker, offers that wait for one, and how the latest ones ended."""

    def __init__(self) -> None:
        self._transfers: dict[RequestKey, IncomingTransfer] = {}
        self._parked: dict[PeerId, dict[RequestKey, _Offers]] = {}  # each peer's, oldest first
        self._ended: OrderedDict[RequestKey, ReceptionOutcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[IncomingTransfer]:
        return iter(list(self._transfers.values()))

    def open(self, transfer: IncomingTransfer) -> list[ParkedOffer]:
        """Adds a reception; returns the offers that have come for it already."""
        assert transfer.key not in self._transfers, transfer.key
        self._transfers[transfer.key] = transfer
        return list(self._unpark(transfer.key, transfer.peer).values())

    def find(self, key: RequestKey, peer: PeerId) -> IncomingTransfer | None:
        """The open reception `key` if it is `peer`'s to fill."""
        transfer = self._transfers.get(key)
        return transfer if transfer is not None and transfer.peer == peer else None

    def get(self, key: RequestKey) -> IncomingTransfer | None:
        return self._transfers.get(key)

    @property
    def num_parked(self) -> int:
        """Requests that offers wait for, counted once for each peer that offers."""
        return sum(len(parked) for parked in self._parked.values())

    def park(self, key: RequestKey, offer: ParkedOffer) -> list[tuple[RequestKey, ParkedOffer]]:
        """Keeps an offer until its request comes, one for each range of heads: a worker that dials anew replaces its
        own. If there are too many, the oldest of whoever has most of them go and are returned: a peer that floods
        makes room for the others."""
        offers = self._unpark(key, offer.peer)
        offers[offer.heads] = offer
        self._parked.setdefault(offer.peer, {})[key] = offers
        if self.num_parked <= MAX_PARKED_OFFERS:
            return []
        greediest = max(self._parked, key=lambda peer: len(self._parked[peer]))
        evicted_key = next(iter(self._parked[greediest]))
        return [(evicted_key, evicted) for evicted in self._unpark(evicted_key, greediest).values()]

    def _unpark(self, key: RequestKey, peer: PeerId) -> _Offers:
        parked = self._parked.get(peer, {})
        offers = parked.pop(key, {})
        if not parked:
            self._parked.pop(peer, None)
        return offers

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
        """Receptions of which one link has said nothing since `moment`; stale parked offers are forgotten."""
        parked = [(key, peer, offers) for peer, by_key in self._parked.items() for key, offers in by_key.items()]
        for key, peer, offers in parked:
            if all(offer.seen_at < moment for offer in offers.values()):
                self._unpark(key, peer)
        return [
            transfer
            for transfer in self._transfers.values()
            if any(stream.last_sign < moment for stream in transfer.streams.values())
        ]
