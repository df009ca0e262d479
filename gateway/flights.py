"""The requests in flight, and the one way out of here for each of them.

A flight leaves exactly once, by `end`: out of the books, one last word to its consumer, and a Cancel to each worker
that still has it. Knows no socket: messages leave through `send`.
"""

import logging
from collections.abc import Callable

from gateway.backend import BackendError, OverloadedError, RequestFailedError
from gateway.flight import Flight, Leg
from gateway.observer import Audience
from gateway.router import InFlightBook
from gateway.worker import Worker
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    EndReason,
    GatewayToWorker,
    PrefillRequest,
    RequestKey,
    RequestOutput,
    Role,
)

logger = logging.getLogger(__name__)

Send = Callable[[str, GatewayToWorker], bool]
"""Sends to a worker id; False if the worker is unknown or its queue is full."""


class Flights:
    """All requests that are dispatched and not over. `book` is what the router sees of them.

    Counts outputs that came for no live request in `num_late_outputs`. `clock` gives seconds, monotonic.
    """

    MAX_LATE_CANCELS_PER_TICK = 256

    def __init__(self, send: Send, audience: Audience, clock: Callable[[], float]) -> None:
        self.book = InFlightBook()
        self.num_late_outputs = 0
        self._send = send
        self._audience = audience
        self._clock = clock
        self._flights: dict[RequestKey, Flight] = {}
        self._late_cancels: set[tuple[str, RequestKey]] = set()  # sent since the last tick

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, flight: Flight, prefill: PrefillRequest, decode: DecodeRequest | None) -> Leg | None:
        """Sends the request to its workers; returns the leg whose worker can't be reached, None if all are told."""
        self._flights[flight.key] = flight
        num_prompt, max_tokens = len(flight.spec.prompt_token_ids), flight.spec.sampling.max_tokens
        if not self._start_leg(flight, flight.prefill, prefill, num_prompt):
            return flight.prefill
        if flight.decode is None or decode is None:
            return None
        told = self._start_leg(flight, flight.decode, decode, num_prompt + max_tokens)
        return None if told else flight.decode

    def on_output(self, worker: Worker, output: RequestOutput) -> None:
        """Takes a worker's output. The exception boundary of one request: a bug in here is that request's loss."""
        flight = self._flights.get((output.request_id, output.attempt))
        leg = None if flight is None else flight.leg_on(worker)
        if flight is None or leg is None:
            self._on_late_output(worker.worker_id, output)
            return
        try:
            self._take(flight, leg, output)
        except BackendError as error:
            self.end(flight, error=error)
        except Exception:
            logger.exception("request %s: output could not be handled", output.request_id)
            self.end(flight, error=RequestFailedError("internal error"))

    def on_departure(self, worker: Worker) -> None:
        """Fails what needed this worker; once decode has all of the KV, prefill isn't needed any more."""
        for flight in tuple(self._flights.values()):
            leg = flight.leg_on(worker)
            if leg is None:
                continue
            self._leave(flight, leg)
            if flight.needs(leg):
                self.end(flight, error=RequestFailedError(f"the {leg.role.value} worker of the request was lost"))

    def on_tick(self, now: float) -> None:
        """Fails what is past a deadline."""
        self._late_cancels.clear()
        for flight in tuple(self._flights.values()):
            if error := flight.overdue(now):
                self.end(flight, error=error)

    def end(self, flight: Flight, *, finish: EndReason | None = None, error: BackendError | None = None) -> None:
        """The one way out. Without `finish` and `error` the consumer has left. No-op if it is over already."""
        if self._flights.pop(flight.key, None) is None:
            return
        if error is not None:
            logger.warning("request %s failed: %s", flight.spec.request_id, error)
            flight.stream.fail(error)
        owed = [leg for leg in flight.legs if leg.active]
        for leg in flight.legs:
            self._leave(flight, leg)
        for leg in owed:
            self._send(leg.worker_id, Cancel(*flight.key))
        self._audience.tell(lambda observer: observer.on_request_end(flight.outcome(self._clock(), finish, error)))

    def end_all(self, error: BackendError) -> None:
        """Fails every request."""
        for flight in tuple(self._flights.values()):
            self.end(flight, error=error)

    def check_integrity(self, is_live: Callable[[str, str], bool]) -> None:
        """Raises AssertionError unless each booked entry is an active leg and each active leg's worker lives.

        `is_live` takes worker id and generation.
        """
        active = {
            (leg.worker_id, flight.spec.request_id): leg.generation
            for flight in self._flights.values()
            for leg in flight.legs
            if leg.active
        }
        surplus = self.book.entries - active.keys()
        assert not surplus, f"booked without an active request: {sorted(surplus)}"
        for (worker_id, request_id), generation in active.items():
            assert is_live(worker_id, generation), f"{request_id} runs on {worker_id}, which is gone"

    def _start_leg(self, flight: Flight, leg: Leg, message: GatewayToWorker, num_tokens: int) -> bool:
        leg.active = self._send(leg.worker_id, message)
        if leg.active:
            self.book.add(leg.worker_id, flight.spec.request_id, num_tokens)
        return leg.active

    def _take(self, flight: Flight, leg: Leg, output: RequestOutput) -> None:
        delta = flight.receive(leg, output)
        if not leg.active or leg.role is Role.PREFILL:  # the prompt is computed, whatever prefill still has to send
            self.book.discard(leg.worker_id, flight.spec.request_id)
        if delta is None:
            return
        if not flight.stream.push(delta):
            raise OverloadedError("the answer was not read fast enough")
        if delta.finish is not None:
            self.end(flight, finish=delta.finish)

    def _on_late_output(self, worker_id: str, output: RequestOutput) -> None:
        """For a request that is over. A worker that goes on with it has missed our Cancel: say it again, but not for
        each of the outputs that are on their way meanwhile."""
        self.num_late_outputs += 1
        cancel = (worker_id, (output.request_id, output.attempt))
        may_cancel = len(self._late_cancels) < self.MAX_LATE_CANCELS_PER_TICK and cancel not in self._late_cancels
        if output.end is None and may_cancel:
            self._late_cancels.add(cancel)
            self._send(worker_id, Cancel(output.request_id, output.attempt))

    def _leave(self, flight: Flight, leg: Leg) -> None:
        leg.active = False
        self.book.discard(leg.worker_id, flight.spec.request_id)
