"""What the sender says of a transfer, made from its books: offers, frame headers, the first token. Pure."""

from dataclasses import dataclass
from typing import Final

import msgspec

from kvtransfer.checksum import checksum
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvFirstToken, KvHeader, KvHello, KvOffer, KvWelcome
from kvtransfer.layout import KvBody, head_bytes, max_frame_tokens
from kvtransfer.outgoing import OutgoingTransfer, Piece
from kvtransfer.peers import heads_of


@dataclass(frozen=True)
class FrameOptions:
    """`with_checksum`: each frame carries one, and the receiver asks again for what arrives damaged. `wire_dtype`: what
    KV is packed into for receivers that take it; None: it goes as it lies in the pool. `together_bytes`: K and V of
    several layers that are ready at once go in one frame up to this size; 0: each layer goes alone."""

    with_checksum: bool = False
    wire_dtype: str | None = None
    together_bytes: int = 0


PLAIN: Final = FrameOptions()
TOGETHER_BYTES: Final = 1 << 20
"""What workers put into one frame: half of it takes an eighth longer over loopback, and more gains nothing."""
assert TOGETHER_BYTES <= 2 * MAX_BODY_BYTES


class FrameMaker:
    """Cuts KV into frames that bring the KV heads of `hello`'s link."""

    def __init__(self, hello: KvHello, options: FrameOptions) -> None:
        self._dtype = hello.layout.dtype
        self._heads = heads_of(hello)
        self._options = options
        self._layout = hello.layout

    def sizes(self, wire_dtype: str | None = None) -> tuple[int, int]:
        """Bytes of K and V of one token in one layer, and the most tokens of a frame."""
        start, stop = self._heads
        token_bytes = (stop - start) * head_bytes(self._layout, wire_dtype or self._dtype)
        return 2 * token_bytes, max_frame_tokens(token_bytes)

    @property
    def together_bytes(self) -> int:
        return self._options.together_bytes

    def dtype_for(self, welcome: KvWelcome) -> str | None:
        """What to pack KV into for the receiver that said `welcome`; None: it goes in the pool's own dtype, because the
        receiver takes nothing else or packing would not make it smaller."""
        wanted = self._options.wire_dtype
        if wanted is None or wanted not in welcome.wire_dtypes:
            return None
        return wanted if self.sizes(wanted)[0] < self.sizes()[0] else None

    def header(self, transfer: OutgoingTransfer, piece: Piece, body: KvBody) -> KvHeader:
        """The header of the next frame of `transfer`."""
        head_start, head_stop = self._heads
        layer, start, stop, dtype, num_layers = piece
        header = KvHeader(
            *transfer.key,
            layer=layer,
            start=start,
            stop=stop,
            head_start=head_start,
            head_stop=head_stop,
            dtype=dtype or self._dtype,
            sent_bytes=transfer.sent_bytes,
            resend=transfer.resend_of(layer),
            num_layers=num_layers,
        )
        if not self._options.with_checksum:
            return header
        return msgspec.structs.replace(header, checksum=checksum(header, body))


def offer_of(transfer: OutgoingTransfer) -> KvOffer:
    return KvOffer(
        *transfer.key,
        num_tokens=transfer.num_tokens,
        sent_bytes=transfer.sent_bytes,
        num_resends=transfer.num_resends,
    )


def first_token_of(transfer: OutgoingTransfer, token_id: int) -> KvFirstToken:
    return KvFirstToken(
        *transfer.key,
        token_id=token_id,
        sent_bytes=transfer.sent_bytes,
        num_resends=transfer.num_resends,
        logprob=transfer.first_logprob,
        siblings=dict(transfer.siblings),
    )
