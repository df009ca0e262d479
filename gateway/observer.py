"""What the dispatcher tells whoever keeps metrics."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.backend import BackendError
from gateway.failover import RetryReason
from gateway.modes import Mode
from kvtransfer.request_parts import EndReason, LifetimeEvent

logger = logging.getLogger(__name__)

Readings = Mapping[LifetimeEvent, float]
"""Lifetime readings of one worker, seconds since it received the request."""


@dataclass(frozen=True)
class Phases:
    """Where a request's time went, seconds; None where a reading is missing.

    Of a finished request with all readings they add up to the whole time, from the arrival of the call to the last
    token at the gateway, because each phase begins where the one before it ends:

       dispatch   retry     queue     prefill     kv_reserve  kv_start    kv_transfer  batch_wait  decode   delivery
      |---------|--------|---------|-------------|----------|-----------|------------|-----------|--------|---------|
    arrival    sent  sent last  SCHEDULED   FIRST_TOKEN  RESERVED  FIRST_FRAME    SPLICED     RUNNING   ENDED      end

    `retry` is there only if the first attempt was not the last: all that the attempts before the last one took, and the
    waits for workers. The phases behind it are those of the last attempt.

    Decode reserves and takes KV while prefill computes, so what is done by the first token takes no time of its own:
    `kv_reserve`, `kv_start` and `kv_transfer` are what decode kept the request waiting for behind it. A request that
    ends with prefill's token goes from FIRST_TOKEN straight to its delivery.

    Where decode computes the prompt, all readings are its own, no KV moves, and `decode` begins with the first token:

       dispatch   retry     queue     prefill       decode      delivery
      |---------|--------|---------|-----------|-------------|----------|
    arrival    sent  sent last  RUNNING   FIRST_TOKEN      ENDED       end
    """

    dispatch_s: float
    retry_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    kv_reserve_s: float | None = None
    kv_start_s: float | None = None
    kv_transfer_s: float | None = None
    batch_wait_s: float | None = None
    decode_s: float | None = None
    delivery_s: float | None = None

    @classmethod
    def of(
        cls,
        sent_s: float,
        end_s: float,
        prefill: Readings | None,
        decode: Readings,
        *,
        is_finished: bool,
        retry_s: float | None = None,
    ) -> "Phases":
        """`sent_s`, `end_s`: first dispatch and end, seconds since arrival on the gateway's clock. `retry_s`: from the
        first dispatch to the last one, None if there was only one. `prefill` is None if decode computed the prompt,
        `decode` is empty if it had no part.

        Both workers' clocks start when the request reaches them, which is taken for the moment it was sent: each phase
        is wrong by at most the way of one message. A reading before the last one is moved onto it.
        """
        seconds: dict[str, float] = {}
        at = last_sent_s = sent_s + (retry_s or 0.0)
        for name, reading in _ends_of_phases(prefill, decode):
            if reading is None:
                return cls(sent_s, retry_s, **seconds)
            moment = min(max(at, last_sent_s + reading), end_s)
            seconds[name], at = moment - at, moment
        return cls(sent_s, retry_s, **seconds, delivery_s=end_s - at if is_finished else None)


_PREFILL_PHASES: Final = {LifetimeEvent.SCHEDULED: "queue_s", LifetimeEvent.FIRST_TOKEN: "prefill_s"}
_DECODE_PHASES: Final = {
    LifetimeEvent.RESERVED: "kv_reserve_s",
    LifetimeEvent.FIRST_FRAME: "kv_start_s",
    LifetimeEvent.SPLICED: "kv_transfer_s",
    LifetimeEvent.RUNNING: "batch_wait_s",
    LifetimeEvent.ENDED: "decode_s",
}
_LOCAL_PHASES: Final = {
    LifetimeEvent.RUNNING: "queue_s",
    LifetimeEvent.FIRST_TOKEN: "prefill_s",
    LifetimeEvent.ENDED: "decode_s",
}
"""The phase that ends with each reading, in order."""


def _ends_of_phases(prefill: Readings | None, decode: Readings) -> list[tuple[str, float | None]]:
    """(name of a phase, the reading that it ends with), in order."""
    if prefill is None:
        return [(name, decode.get(event)) for event, name in _LOCAL_PHASES.items()]
    on_prefill = [(name, prefill.get(event)) for event, name in _PREFILL_PHASES.items()]
    on_decode = [(name, decode.get(event)) for event, name in _DECODE_PHASES.items()] if decode else []
    return on_prefill + on_decode


@dataclass(frozen=True)
class RequestOutcome:
    """One request that is over. `finish` is set if it finished, `error` if it failed, neither if the client left.
    `handoff_gap_s`: between tokens 0 and 1 at the gateway, None if not the same attempt gave both, or no two workers.
    `mode`: where the last attempt's prompt was computed."""

    request_id: str
    finish: EndReason | None
    error: BackendError | None
    phases: Phases
    handoff_gap_s: float | None = None
    mode: Mode = Mode.DISAGGREGATED


@dataclass(frozen=True)
class KvHandover:
    """How long the KV of one attempt took from prefill to decode, seconds; None where a reading is missing.

    Both are between readings of one clock, prefill's: from the first frame that went out to decode's word that it has
    everything, and to the same word from the moment when all KV was computed. The second one is what the transfer added
    to the request; the rest of it was hidden behind the computation.
    """

    transfer_s: float | None
    exposed_s: float | None

    @classmethod
    def of(cls, prefill: Readings) -> "KvHandover":
        started, ready, taken = (prefill.get(event) for event in _KV_EVENTS)
        return cls(
            None if started is None or taken is None else max(0.0, taken - started),
            None if ready is None or taken is None else max(0.0, taken - ready),
        )


_KV_EVENTS: Final = (LifetimeEvent.KV_STARTED, LifetimeEvent.KV_READY, LifetimeEvent.KV_TAKEN)


class DispatchObserver(Protocol):
    """Called from the event loop; must not block. What it raises is logged and goes no further."""

    def on_request_end(self, outcome: RequestOutcome) -> None:
        """Once for each dispatched request."""
        ...

    def on_retry(self, reason: RetryReason) -> None:
        """A request that had lost an attempt has got another one."""
        ...

    def on_handover(self, handover: KvHandover) -> None:
        """Decode has taken the KV of an attempt over, whose request may be over by now."""
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
