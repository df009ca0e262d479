"""The protocol of the KV hand-over, between prefill and decode workers. What its messages have in common with those of
the control plane is in `kvtransfer/codec.py`.

    prefill -> decode    KvHello, KvOffer, KvHeader (+ K frame + V frame), KvFirstToken, KvAbort
    decode  -> prefill   KvWelcome, Refused, KvGrant, KvCredit, KvResend, KvDone, KvRevoke

KV frames that are lost or damaged are sent again. Messages of a transfer say how many KV bytes it had sent before them
(`sent_bytes`, repeats included): as a link keeps the order, what has not arrived by then never will. A layer of which a
frame is missing is asked for again from its next token on (KvResend, numbered 1, 2, ... in a transfer), and its frames
name the last such number that was heard for it: so those sent before are told from those sent after.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from kvtransfer.codec import Attempt, Count, Decoder, Message, Name, Positive, Text
from kvtransfer.errors import MessageError
from kvtransfer.messages import Refused
from kvtransfer.request_parts import MAX_CHOICES, Drawn, TokenId, TokenLogprob
from kvtransfer.worker_facts import Fingerprint, KvLayout

MAX_BODY_BYTES = 1 << 20
"""Upper bound of one K or V frame, bytes: larger frames slow CURVE down without helping a clear link."""
MAX_WIRE_DTYPES = 8
MAX_WORDS = 16
"""Messages in one frame: one as it is, several as an array, in the order in which they were said. Enough that hundreds
fit a queue; more at once would keep the other side waiting for the first."""


# --- prefill -> decode -----------------------------------------------------------------------------


class KvHello(Message, frozen=True):
    """First message on a KV connection. It brings the KV heads [head_start, head_stop) of all transfers.

    A worker whose tensor parallelism spreads the KV heads over several processes has a connection for each of these;
    their head ranges must not overlap. A transfer is granted once all heads of `layout` are offered, and is complete
    when on each connection all tokens of all layers, and then the first token, have come.
    """

    protocol: Positive
    worker_id: Name
    generation: Name
    fingerprint: Fingerprint
    layout: KvLayout
    head_start: Count = 0
    head_stop: Positive | None = None  # None: the last one of `layout`


class KvOffer(Message, frozen=True):
    """KV of `num_tokens` tokens, those of the prompt and of the output so far, will come for (request, attempt), once
    granted. Repeated while the transfer is open. `num_resends`: number of the last KvResend that was heard."""

    request_id: Name
    attempt: Attempt
    num_tokens: Positive
    sent_bytes: Count = 0
    num_resends: Count = 0


class KvHeader(Message, frozen=True):
    """K and V of layers [layer, layer + num_layers), tokens [start, stop) and the link's KV heads
    [head_start, head_stop); two bodies follow, each [num_layers, stop - start, head_stop - head_start, head_dim] of
    `dtype`, C-contiguous. Small pieces of several layers that are ready at once travel together.

    `dtype` is the pools' or, where the receiver's KvWelcome names it, "float8_e4m3fn+scales". Then a body is float32
    scales [num_layers, stop - start, head_stop - head_start], one for each head of each token in each layer, and behind
    them the values, which times their scale are K or V.

    `resend`: number of the last KvResend for these layers that was heard, 0 if none. `checksum`: CRC-32 over this
    message without it, then K, then V (`kvtransfer/checksum.py`); a frame without one is taken as it comes.
    """

    request_id: Name
    attempt: Attempt
    layer: Count
    start: Count
    stop: Count
    head_start: Count
    head_stop: Count
    dtype: Text
    sent_bytes: Count = 0
    resend: Count = 0
    checksum: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] | None = None
    num_layers: Positive = 1

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + self.num_layers)

    @property
    def num_rows(self) -> int:
        """Tokens, counted once for each layer."""
        return self.num_layers * (self.stop - self.start)


class KvFirstToken(Message, frozen=True):
    """Behind the last KV frame: the token that prefill sampled, with its log probability if the request asks for it.
    Said again after each resend, and when the grant is repeated. `num_resends` as in KvOffer. `siblings`: those of the
    other choices that take the same KV, by their request ids."""

    request_id: Name
    attempt: Attempt
    token_id: TokenId
    sent_bytes: Count = 0
    num_resends: Count = 0
    logprob: TokenLogprob | None = None
    siblings: Annotated[dict[Name, Drawn], msgspec.Meta(max_length=MAX_CHOICES - 1)] = msgspec.field(
        default_factory=dict
    )


class KvAbort(Message, frozen=True):
    """No KV will come (any more) for (request, attempt)."""

    request_id: Name
    attempt: Attempt
    reason: Text


# --- decode -> prefill -----------------------------------------------------------------------------


class KvWelcome(Message, frozen=True):
    """The decode worker accepts this peer's KV. `generation` is the decode worker's. `wire_dtypes`: what frames may be
    in beside the pools' own dtype."""

    generation: Name
    wire_dtypes: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_WIRE_DTYPES)] = ()


class KvGrant(Message, frozen=True):
    """Blocks are reserved: ship tokens from `first_token` on, with at most `window_bytes` not yet credited."""

    request_id: Name
    attempt: Attempt
    first_token: Count
    window_bytes: Positive


class KvCredit(Message, frozen=True):
    """KV bytes of (request, attempt) that are no longer on their way, from the start: spliced, dropped, or lost."""

    request_id: Name
    attempt: Attempt
    settled_bytes: Count


class KvResend(Message, frozen=True):
    """KV of `layer` is missing from token `start` on: send it again. `number` counts these in a transfer."""

    request_id: Name
    attempt: Attempt
    layer: Count
    start: Count
    number: Positive


class KvDone(Message, frozen=True):
    """All KV and the first token are here: the prefill worker may free its blocks."""

    request_id: Name
    attempt: Attempt


class KvRevoke(Message, frozen=True):
    """The decode worker no longer wants (request, attempt)."""

    request_id: Name
    attempt: Attempt
    reason: Text


PrefillToDecode = KvHello | KvOffer | KvHeader | KvFirstToken | KvAbort
DecodeToPrefill = KvWelcome | Refused | KvGrant | KvCredit | KvResend | KvDone | KvRevoke


_Word = TypeVar("_Word")


class WordsDecoder(Decoder[_Word | list[_Word]], Generic[_Word]):
    """Decodes frames of one direction's messages, of which there may be several in one."""

    def __init__(self, word: Any) -> None:
        super().__init__(word | Annotated[list[word], msgspec.Meta(min_length=1, max_length=MAX_WORDS)])

    def words(self, frames: Sequence[bytes | memoryview]) -> list[_Word | MessageError]:
        """Those in `frames`, which must be one frame, or what is wrong with it; never none."""
        found = self.or_error(frames)
        return [*found] if isinstance(found, list) else [found]


decode_from_prefill: Final[WordsDecoder[PrefillToDecode]] = WordsDecoder(PrefillToDecode)
decode_from_decode: Final[WordsDecoder[DecodeToPrefill]] = WordsDecoder(DecodeToPrefill)
