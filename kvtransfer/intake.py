"""What a decode worker does with KV frames: check, splice, credit, ask again. No thread, socket or clock.

A frame is spliced only if its checksum fits (where it has one), it is within the pool's layout, and it is the next one
of its layer. What is missing is asked for again; the answers may be lost as well, and so may be the question, so every
message that says how far the sender has got (KvFirstToken, a repeated KvOffer) is a chance to notice.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.checksum import is_intact
from kvtransfer.codec import RequestKey
from kvtransfer.errors import LossError
from kvtransfer.kv_messages import DecodeToPrefill, KvCredit, KvFirstToken, KvHeader, KvOffer
from kvtransfer.layout import KvBody, check_header, head_bytes
from kvtransfer.stream import MAX_RESENDS_IN_VAIN, IncomingStream, Verdict
from kvtransfer.worker_facts import KvLayout

CREDITS_A_WINDOW = 4


class KvSink(Protocol):
    """Where KV is written to: the decode worker's pool."""

    def splice(self, key: RequestKey, header: KvHeader, body: KvBody) -> None:
        """Copies K and V of the header's layers and tokens into the blocks that `key` owns."""
        ...

    def finish(self, key: RequestKey) -> None:
        """Returns when all that was spliced for `key` can be read by the next step."""
        ...


@dataclass
class IntakeCounts:
    """Since the start: bytes of KV spliced, and frames that were not."""

    spliced_bytes: int = 0
    num_corrupt: int = 0  # the checksum did not fit
    num_stale: int = 0  # came behind one that was lost or damaged, and was asked for again with it
    num_resends: int = 0  # KvResends said


class FrameIntake:
    """Takes frames for a pool of `layout`. `window_bytes`: how much the sender may have on its way uncredited."""

    def __init__(
        self, layout: KvLayout, sink: KvSink, window_bytes: int, send: Callable[[bytes, DecodeToPrefill], None]
    ) -> None:
        self._layout = layout
        self._sink = sink
        self._window_bytes = window_bytes
        self._send = send
        self.counts = IntakeCounts()

    def take(self, stream: IncomingStream, header: KvHeader, body: KvBody) -> None:
        """One frame. Raises ProtocolError for a breach, LossError if the layer was asked for too often."""
        num_bytes = len(body.k) + len(body.v)
        if is_intact(header, body):
            check_header(header, len(body.k), len(body.v), self._layout)
            self._take_intact(stream, header, body, stream.judge(header))
            stream.settle(header.sent_bytes, num_bytes)
        else:
            # As good as lost: nothing that its header says is to be believed, so the gap that it leaves has to show.
            self.counts.num_corrupt += 1
            stream.settle(0, num_bytes)
        if self._is_credit_due(stream):
            self.credit(stream)

    def _is_credit_due(self, stream: IncomingStream) -> bool:
        """A quarter of the window is settled, and the sender may have to wait for it: not if all that is missing fits
        beside what it believes to be on its way. A word that nobody waits for still wakes two threads."""
        uncredited = stream.uncredited_bytes
        if uncredited < self._window_bytes // CREDITS_A_WINDOW:
            return False
        start, stop = stream.heads
        # As it lies in the pool, which no format on the wire is larger than.
        missing = stream.num_missing * 2 * (stop - start) * head_bytes(self._layout, self._layout.dtype)
        return uncredited + missing > self._window_bytes

    def _take_intact(self, stream: IncomingStream, header: KvHeader, body: KvBody, verdict: Verdict) -> None:
        if verdict is Verdict.NEXT:
            self._sink.splice(stream.key, header, body)
            stream.spliced(header)
            self.counts.spliced_bytes += len(body.k) + len(body.v)
            return
        self.counts.num_stale += 1
        if verdict is Verdict.GAP:
            self._ask_again(stream, stream.lost_layers(header))

    def on_first_token(self, stream: IncomingStream, message: KvFirstToken) -> None:
        """Everything has been sent; whatever is not here was lost."""
        stream.first_token_id, stream.first_logprob = message.token_id, message.logprob
        stream.siblings = message.siblings
        stream.settle(message.sent_bytes)
        self._ask_again(stream, stream.missing_layers(message.num_resends))
        if stream.uncredited_bytes and not stream.has_all_kv:
            self.credit(stream)

    def on_repeated_offer(self, stream: IncomingStream, offer: KvOffer) -> None:
        """All that was sent before has arrived, or never will; and so for what we had asked for by then."""
        lost = stream.settle(offer.sent_bytes)
        for resend in stream.unheard_resends(offer.num_resends):
            self._send(stream.link, resend)
        if lost:
            self._ask_again(stream, stream.missing_layers(offer.num_resends))
        if stream.settled_bytes:
            self.credit(stream)

    def _ask_again(self, stream: IncomingStream, layers: Iterable[int]) -> None:
        for layer in layers:
            resend = stream.ask_again(layer)
            if resend is None:
                raise LossError(f"layer {layer} was sent {MAX_RESENDS_IN_VAIN} times and never arrived whole")
            self.counts.num_resends += 1
            self._send(stream.link, resend)

    def credit(self, stream: IncomingStream) -> None:
        """Says what is settled. Where that is lost, a sender that waits for it repeats its offer within a second."""
        self._send(stream.link, KvCredit(*stream.key, settled_bytes=stream.settled_bytes))
        stream.credited_bytes = stream.settled_bytes
