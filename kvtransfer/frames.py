"""What the sender says of a transfer, made from its books: offers, frame headers, the first token. Pure."""

from dataclasses import dataclass
from typing import Final

import msgspec

from kvtransfer.checksum import checksum
from kvtransfer.layout import KvBody, head_bytes, max_frame_tokens
from kvtransfer.messages import KvFirstToken, KvHeader, KvHello, KvOffer
from kvtransfer.outgoing import OutgoingTransfer, Piece
from kvtransfer.peers import heads_of


@dataclass(frozen=True)
class FrameOptions:
    """`with_checksum`: each frame carries one, and the receiver asks again for what arrives damaged."""

    with_checksum: bool = False


PLAIN: Final = FrameOptions()


class FrameMaker:
    """Cuts KV into frames that bring the KV heads of `hello`'s link."""

    def __init__(self, hello: KvHello, options: FrameOptions) -> None:
        self._dtype = hello.layout.dtype
        self._heads = heads_of(hello)
        self._options = options
        start, stop = self._heads
        self.token_bytes = 2 * (stop - start) * head_bytes(hello.layout)
        """K and V of one token in one layer."""
        self.max_tokens = max_frame_tokens(hello.layout, stop - start)

    def header(self, transfer: OutgoingTransfer, piece: Piece, body: KvBody) -> KvHeader:
        """The header of the next frame of `transfer`."""
        head_start, head_stop = self._heads
        header = KvHeader(
            *transfer.key,
            layer=piece.layer,
            start=piece.start,
            stop=piece.stop,
            head_start=head_start,
            head_stop=head_stop,
            dtype=self._dtype,
            sent_bytes=transfer.sent_bytes,
            resend=transfer.resend_of(piece.layer),
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
        *transfer.key, token_id=token_id, sent_bytes=transfer.sent_bytes, num_resends=transfer.num_resends
    )
