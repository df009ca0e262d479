"""What the engine asks of the receiver's thread, and the bounds it works within."""

from dataclasses import dataclass

from kvtransfer.codec import RequestKey
from kvtransfer.incoming import PeerId


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
