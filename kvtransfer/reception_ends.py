"""How the transfers to a decode worker end: each once, with one word to the engine and at most one to each link
that it is on. No socket, tensor or clock.

    arrived    all KV and the first token are in the pool    KvDone to all links
    aborted    the prefill worker has taken it back          KvRevoke to the links that did not say so
    failed     a breach, losses, or the lease ran out        KvRevoke to all links, but one that has brought it about
    closed     the engine wants it no more                   KvRevoke to all links
"""

from collections.abc import Callable

from kvtransfer.codec import RequestKey
from kvtransfer.incoming import IncomingBook, IncomingTransfer, KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.intake import KvSink
from kvtransfer.kv_messages import DecodeToPrefill, KvDone, KvRevoke


class ReceptionEnds:
    """Ends what is in `book`. `send` takes words for links, `report` what the engine has to know."""

    def __init__(
        self,
        book: IncomingBook,
        sink: KvSink,
        send: Callable[[bytes, DecodeToPrefill], None],
        report: Callable[[KvOffered | ReceptionEnded], None],
    ) -> None:
        self._book = book
        self._sink = sink
        self._send = send
        self._report = report
        self._first_frame_at: dict[RequestKey, float] = {}

    def note_frame(self, key: RequestKey, now: float) -> None:
        """A frame of KV has come for an open transfer; its end will say when the first one did."""
        self._first_frame_at.setdefault(key, now)

    def arrived(self, transfer: IncomingTransfer) -> None:
        """All of it is here. Raises ProtocolError if its links disagree about the first token."""
        token_id = transfer.first_token_id
        self._sink.finish(transfer.key)
        for link in transfer.streams:
            self._send(link, KvDone(*transfer.key))
        self._close(
            ReceptionEnded(
                transfer.key,
                ReceptionOutcome.ARRIVED,
                token_id,
                self._first_frame_at.get(transfer.key),
                siblings=transfer.siblings,
                first_logprob=transfer.first_logprob,
            )
        )

    def end(
        self,
        key: RequestKey,
        outcome: ReceptionOutcome,
        reason: str,
        *,
        told: str | None = None,
        but: bytes | None = None,
    ) -> None:
        """Ends a transfer that will not arrive, if it is open. `reason` is for the engine and for all links `but` one,
        unless these are `told` another."""
        transfer = self._book.get(key)
        for link in transfer.streams if transfer is not None else ():
            if link != but:
                self._send(link, KvRevoke(*key, reason=told or reason))
        self._close(ReceptionEnded(key, outcome, None, self._first_frame_at.get(key), reason))

    def _close(self, ended: ReceptionEnded) -> None:
        self._first_frame_at.pop(ended.key, None)
        if self._book.close(ended.key, ended.outcome) is not None:
            self._report(ended)
