"""The requests in flight: what their workers say, and the one way out of here for each of them.

A flight leaves exactly once, by `end`: out of the books, one last word to its consumer, and a Cancel to each worker
that still has it. One that has lost an attempt and may have another waits here, without workers, until somebody calls
`start` for it. Knows no socket: messages leave through `send`.
"""

import logging
from collections.abc import Callable, Sequence

from gateway.attempt import Attempt, Leg
from gateway.backend import BackendError, OverloadedError, RequestFailedError
from gateway.failover import SetbackError
from gateway.flight import Flight, FlightState
from gateway.held_prefixes import HeldPrefixes
from gateway.modes import Mode
from gateway.observer import Audience
from gateway.router import InFlightBook, Route
from gateway.worker import Worker
from kvtransfer.codec import RequestKey
from kvtransfer.line_budget import MAX_LOGGED_CHARS, LineBudget
from kvtransfer.messages import Cancel, GatewayToWorker
from kvtransfer.request_parts import EndReason, LifetimeEvent, RequestOutput, Sibling
from kvtransfer.worker_facts import LeaveCause, Role

logger = logging.getLogger(__name__)

Send = Callable[[str, GatewayToWorker], bool]
"""Sends to a worker id; False if the worker is unknown or its queue is full."""


class Flights:
    """All requests that are dispatched and not over. `book` and `held` are what the router sees of them.

    Counts outputs that came for no live attempt in `num_late_outputs`. `clock` gives seconds, monotonic.
    """

    MAX_LATE_CANCELS_PER_TICK = 256

    def __init__(self, send: Send, audience: Audience, clock: Callable[[], float]) -> None:
        self.book = InFlightBook()
        self.held = HeldPrefixes()
        self.num_late_outputs = 0
        self._send = send
        self._audience = audience
        self._clock = clock
        self._flights: dict[str, Flight] = {}  # by request id
        self._late_cancels: set[tuple[str, RequestKey]] = set()  # sent since the last tick
        self._lines: LineBudget[str] = LineBudget()  # kinds: what happened, and the kind of error

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting(self) -> tuple[Flight, ...]:
        """Requests that no worker has, oldest first."""
        return tuple(flight for flight in self._flights.values() if flight.state is FlightState.WAITING)

    def start(self, flights: Sequence[Flight], route: Route) -> Leg | None:
        """Begins the next attempt of a request, or the first one of several choices of a prompt, and tells its workers.
        Returns the leg whose worker can't be reached, and then all of them still wait; None if all are told."""
        now = self._clock()
        attempt, *_ = [self._begin(flight, route, now) for flight in flights]
        for worker in route.workers:
            self.held.meet(worker)
        siblings = tuple(Sibling(flight.request_id, flight.sampling.choice_index) for flight in flights[1:])
        for leg, message in attempt.requests(route, siblings):
            if not self._send(leg.worker_id, message):
                for flight in flights:
                    self._recall(flight)
                    flight.move(FlightState.WAITING)
                return leg
            for flight in flights:
                self._book_in(flight, leg.role, leads=flight is flights[0])
        for flight in flights:
            self._tell_retry(flight)
        return None

    def _tell_retry(self, flight: Flight) -> None:
        if reason := flight.failover.begun():
            self._audience.tell(lambda observer: observer.on_retry(reason))

    def _begin(self, flight: Flight, route: Route, now: float) -> Attempt:
        self._flights[flight.request_id] = flight
        return flight.begin(route, now)

    def _book_in(self, flight: Flight, role: Role, *, leads: bool) -> None:
        """A worker has been told of the request. Of several choices the first has the prompt for all of them."""
        assert flight.attempt is not None, f"request {flight.request_id} has not begun"
        leg = flight.attempt.leg_of(role)
        leg.active = True
        self.book.add(leg.worker_id, flight.request_id, self._num_booked(flight, leg, leads=leads))

    def on_output(self, worker: Worker, output: RequestOutput) -> None:
        """Takes a worker's output. The exception boundary of one request: a bug in here is that request's loss."""
        found = self._find(worker, output)
        if found is None:
            self._on_late_output(worker.worker_id, output)
            return
        flight, leg = found
        try:
            self._take(flight, leg, output)
        except SetbackError as setback:
            self._set_back(flight, setback)
        except BackendError as error:
            self.end(flight, error=error)
        except Exception:
            if self._lines.may_say("request met a bug", self._clock()):
                logger.exception("request %s: output could not be handled", output.request_id)
            self.end(flight, error=RequestFailedError("internal error"))

    def on_departure(self, worker: Worker, cause: LeaveCause) -> None:
        """A setback for what needed this worker; once decode has all of the KV, prefill isn't needed any more."""
        for flight in tuple(self._flights.values()):
            leg = None if flight.attempt is None else flight.attempt.leg_on(worker)
            if flight.attempt is None or leg is None:
                continue
            self._leave(flight, leg)
            if flight.attempt.needs(leg):
                self._set_back(flight, flight.attempt.loss_of(leg, cause))
        self.held.forget(worker.ref)

    def on_tick(self, now: float) -> None:
        """Fails what is past a deadline, and tells the log what it was spared."""
        self._late_cancels.clear()
        for flight in tuple(self._flights.values()):
            if error := flight.overdue(now):
                self.end(flight, error=error)
        for kind, count in self._lines.take_unsaid(now):
            logger.warning("%s: %d more times", kind, count)

    def end(self, flight: Flight, *, finish: EndReason | None = None, error: BackendError | None = None) -> None:
        """The one way out. Without `finish` and `error` the consumer has left. No-op if it is over already."""
        if self._flights.pop(flight.request_id, None) is None:
            return
        flight.move(FlightState.OVER)
        if error is not None:
            self._warn(f"request failed, {error.kind}", flight, f"failed: {error}")
            flight.stream.fail(error)
        self._recall(flight)
        if not flight.traits.is_step:
            self._audience.tell(lambda observer: observer.on_request_end(flight.outcome(self._clock(), finish, error)))

    def end_all(self, error: BackendError) -> None:
        """Fails every request."""
        for flight in tuple(self._flights.values()):
            self.end(flight, error=error)

    def check_integrity(self, is_live: Callable[[str, str], bool]) -> None:
        """Raises AssertionError unless each booked entry is an active leg, each active leg's worker lives, and
        who waits has no active leg.

        `is_live` takes worker id and generation.
        """
        for flight in self.waiting:
            assert not flight.active_legs, f"{flight.request_id} waits, but {flight.active_legs} have it"
        active = {
            (leg.worker_id, flight.request_id): leg.generation
            for flight in self._flights.values()
            for leg in flight.active_legs
        }
        surplus = self.book.entries - active.keys()
        assert not surplus, f"booked without an active request: {sorted(surplus)}"
        for (worker_id, request_id), generation in active.items():
            assert is_live(worker_id, generation), f"{request_id} runs on {worker_id}, which is gone"

    def _find(self, worker: Worker, output: RequestOutput) -> tuple[Flight, Leg] | None:
        """Whom an output is for; None if that attempt is over on this worker."""
        flight = self._flights.get(output.request_id)
        if flight is None or flight.attempt is None or flight.attempt.spec.attempt != output.attempt:
            return None
        leg = flight.attempt.leg_on(worker)
        return None if leg is None else (flight, leg)

    def _take(self, flight: Flight, leg: Leg, output: RequestOutput) -> None:
        delta = flight.receive(leg, output, self._clock())
        # With prefill's token the prompt is computed, whatever prefill still has to send.
        if not leg.active or (leg.role is Role.PREFILL and output.token_ids):
            self.book.discard(leg.worker_id, flight.request_id)
        self._learn(flight, leg, output)
        if delta is None:
            return
        if not flight.stream.push(delta):
            raise OverloadedError("the answer was not read fast enough")
        if delta.finish is not None:
            self.end(flight, finish=delta.finish)

    def _num_booked(self, flight: Flight, leg: Leg, *, leads: bool) -> int:
        """Tokens that a request will hold on decode, or that prefill probably has to compute for it."""
        if leg.role is Role.DECODE:
            return flight.num_total if leads else flight.sampling.max_tokens
        if not leads:
            return 0
        return len(flight.known_tokens) - self.held.num_held(leg.ref, flight.chain, flight.known_tokens)

    def _learn(self, flight: Flight, leg: Leg, output: RequestOutput) -> None:
        """What an output tells of a worker's cache. With its first tokens it has all of the prompt, so that others that
        begin alike need not wait for the end of this one."""
        if flight.attempt is None:
            return
        spec = flight.attempt.spec
        if leg.role is Role.PREFILL:
            if output.token_ids:
                num_computed = len(spec.prompt_token_ids) + len(spec.output_token_ids)
                self.held.note(leg.ref, flight.chain, flight.known_tokens[:num_computed])
        elif output.end is not None or (output.token_ids and output.start <= len(spec.output_token_ids) + 1):
            self._note_held(flight, leg)
        elif spec.sampling.num_prompt_logprobs is not None:
            return  # it takes nothing from the cache, so it tells nothing of it
        elif flight.attempt.mode is Mode.LOCAL and LifetimeEvent.RESERVED in output.events:
            self.held.correct(leg.ref, flight.chain, flight.known_tokens, output.num_cached)

    def _note_held(self, flight: Flight, leg: Leg) -> None:
        """Decode has the KV of all tokens but the last, once it speaks."""
        if flight.attempt is not None and flight.attempt.merge.has_spoken(Role.DECODE):
            self.held.note(leg.ref, flight.chain, flight.known_tokens[:-1])

    def _set_back(self, flight: Flight, setback: SetbackError) -> None:
        """An attempt is over: its workers are told, and the request waits for others or ends."""
        error = flight.failover.on_setback(setback, self._clock(), has_streamed=flight.num_streamed > 0)
        if error is not None:
            self.end(flight, error=error)
            return
        if not flight.failover.is_turned_away:  # or else, if nobody takes it, its error will say so
            what = f"has lost attempt {flight.num_attempts}: {setback}"
            self._warn(f"attempt lost, {setback.reason.value}", flight, what)
        self._recall(flight)
        flight.move(FlightState.WAITING)

    def _warn(self, kind: str, flight: Flight, what: str) -> None:
        """A line about a request. A thousand that go the same way a second must not fill the log."""
        if self._lines.may_say(kind, self._clock()):
            logger.warning("request %s %.*s", flight.request_id, MAX_LOGGED_CHARS, what)

    def _recall(self, flight: Flight) -> None:
        """Whoever still has the attempt is told that nobody waits for it."""
        if flight.attempt is None:
            return
        owed = flight.attempt.active_legs
        for leg in flight.attempt.legs:
            self._leave(flight, leg)
        for leg in owed:
            self._send(leg.worker_id, Cancel(*flight.attempt.key))

    def _on_late_output(self, worker_id: str, output: RequestOutput) -> None:
        """For an attempt that is over. A worker that goes on with it has missed our Cancel: say it again, but not for
        each of the outputs that are on their way meanwhile."""
        self.num_late_outputs += 1
        cancel = (worker_id, (output.request_id, output.attempt))
        may_cancel = len(self._late_cancels) < self.MAX_LATE_CANCELS_PER_TICK and cancel not in self._late_cancels
        if output.end is None and may_cancel:
            self._late_cancels.add(cancel)
            self._send(worker_id, Cancel(output.request_id, output.attempt))

    def _leave(self, flight: Flight, leg: Leg) -> None:
        if leg.active and leg.role is Role.DECODE:
            self._note_held(flight, leg)
        leg.active = False
        self.book.discard(leg.worker_id, flight.request_id)
