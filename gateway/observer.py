"""What the dispatcher tells whoever keeps metrics."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.backend import BackendError
from gateway.worker import Worker
from kvtransfer.messages import EndReason, LifetimeEvent, Role

logger = logging.getLogger(__name__)

Readings = Mapping[LifetimeEvent, float]
"""Lifetime readings of one worker, seconds since it received the request."""


@dataclass(frozen=True)
class Phases:
    """Where a request's time went, seconds; None where a reading is missing.

         queue          prefill            handover          decode
    |------------|------------------|-------------------|--------------|
    sent      SCHEDULED        FIRST_TOKEN           RUNNING         ENDED
    """

    queue_s: float | None
    prefill_s: float | None
    handover_s: float | None
    decode_s: float | None

    @classmethod
    def of(cls, prefill: Readings, decode: Readings) -> "Phases":
        """From both workers' readings. Both clocks start when the request arrives, which is sent to both at once;
        the hand-over spans the two clocks and is cut at 0, as one message may take longer than the other."""
        scheduled, first_token = prefill.get(LifetimeEvent.SCHEDULED), prefill.get(LifetimeEvent.FIRST_TOKEN)
        running, ended = decode.get(LifetimeEvent.RUNNING), decode.get(LifetimeEvent.ENDED)
        handover = _span(first_token, running)
        return cls(
            queue_s=scheduled,
            prefill_s=_span(scheduled, first_token),
            handover_s=None if handover is None else max(0.0, handover),
            decode_s=_span(running, ended),
        )


def _span(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start


@dataclass(frozen=True)
class RequestOutcome:
    """One request that is over. `finish` is set if it finished, `error` if it failed, neither if the client left.

    `first_token_s` and `total_s` are the gateway's own readings, seconds since dispatch.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish: EndReason | None
    error: BackendError | None
    first_token_s: float | None
    total_s: float
    phases: Phases


class DispatchObserver(Protocol):
    """Called from the event loop; must not block. What it raises is logged and goes no further."""

    def on_events(self, role: Role, events: Readings) -> None:
        """Readings of a running request that had not been reported before."""
        ...

    def on_request_end(self, outcome: RequestOutcome) -> None:
        """Once for each dispatched request."""
        ...

    def on_worker_change(self, workers: Sequence[Worker]) -> None:
        """All live workers, after one has joined, left or stalled."""
        ...


class Audience:
    """Tells the observer, if there is one. What it raises is logged: metrics must not cost anyone a request."""

    def __init__(self, observer: DispatchObserver | None) -> None:
        self._observer = observer

    def tell(self, call: Callable[[DispatchObserver], None]) -> None:
        if self._observer is None:
            return
        try:
            call(self._observer)
        except Exception:
            logger.exception("the metrics observer failed")
