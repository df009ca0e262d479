"""What the engine asks of the sender's thread, and the times it keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtransfer.codec import RequestKey
from kvtransfer.messages import DecodeTarget
from kvtransfer.request_parts import Drawn, TokenLogprob


@dataclass(frozen=True)
class Open:
    """Offer a request's KV to `target`."""

    key: RequestKey
    target: DecodeTarget
    num_tokens: int


@dataclass(frozen=True)
class Ready:
    """KV of tokens [0, stop) of `layer` is in the pool, for each (key, stop)."""

    layer: int
    stops: tuple[tuple[RequestKey, int], ...]


@dataclass(frozen=True)
class FirstToken:
    """The prompt is computed and its first token sampled; and that of each other choice, by request id."""

    key: RequestKey
    token_id: int
    logprob: TokenLogprob | None = None
    siblings: Mapping[str, Drawn] = field(default_factory=dict)


@dataclass(frozen=True)
class Abort:
    """Give a transfer up; answered by TransferEnded unless it has ended already."""

    key: RequestKey
    reason: str
    tell_peer: bool


SendCommand = Open | Ready | FirstToken | Abort


@dataclass(frozen=True)
class SenderTiming:
    """Seconds between an offer and its repetition, and of the receiver's silence, once the first token is known, after
    which a transfer is given up."""

    keepalive: float
    lease: float
