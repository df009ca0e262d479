"""Puts requests on workers: new ones, and those that have lost an attempt.

A request in auto mode may go either way, and each of its attempts anew: see `gateway.modes`. Where one way is closed,
because there is no prefill worker or there has been trouble with it, it takes the other.

A worker that can't be reached is given up at once, not when its beats are missed, and others are tried: no worker has
done anything for the request yet, so that costs it no retry.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from gateway.backend import RequestFailedError, UnavailableError
from gateway.cluster import Cluster
from gateway.flight import Flight, FlightState
from gateway.flights import Flights
from gateway.modes import Mode, ModeRules
from gateway.router import Route, choose
from gateway.worker import Worker
from kvtransfer.worker_facts import Role

logger = logging.getLogger(__name__)

UNREACHABLE = "it can't be reached"


class Placement:
    """`drop` gives a worker up, with a reason; `clock` gives seconds, monotonic."""

    def __init__(
        self,
        cluster: Cluster,
        flights: Flights,
        rules: ModeRules,
        drop: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._flights = flights
        self._rules = rules
        self._drop = drop
        self._clock = clock

    def launch(self, flights: Sequence[Flight]) -> None:
        """The first attempts of requests with one prompt: together, or in as few parts as may run at once on a worker.
        Raises UnavailableError if there is nobody for one of them: a client is told so, and does not wait."""
        waiting = list(flights)
        while waiting:
            route = self._route(waiting[0])
            part = [
                flight for flight in waiting[: route.max_num_seqs] if flight.num_attempts == waiting[0].num_attempts
            ]
            if self._start(part, route):
                del waiting[: len(part)]

    def place_waiting(self) -> None:
        """The next attempt of each request for which there are workers by now. The exception boundary of one request:
        a bug in here is that request's loss."""
        for flight in self._flights.waiting:
            try:
                self._place(flight)
            except Exception:
                logger.exception("request %s could not be placed", flight.request_id)
                self._flights.end(flight, error=RequestFailedError("internal error"))

    def _place(self, flight: Flight) -> None:
        while flight.state is FlightState.WAITING:
            route: Route | None = None
            with suppress(UnavailableError):
                route = self._route(flight)
            elsewhere = route is not None and route.avoids(flight.failover.suspects)
            if refusal := flight.failover.refusal(elsewhere=elsewhere):
                self._flights.end(flight, error=refusal)
            elif route is None or not flight.failover.may_start(self._clock(), elsewhere=elsewhere):
                return
            else:
                self._start([flight], route)

    def _start(self, flights: Sequence[Flight], route: Route) -> bool:
        """False if one of the workers can't be reached; it is given up."""
        lost = self._flights.start(flights, route)
        if lost is not None:
            self._drop(lost.worker_id, UNREACHABLE)
        return lost is None

    def _route(self, flight: Flight) -> Route:
        """Raises UnavailableError."""
        if flight.mode is not Mode.AUTO:
            return self._route_in(flight.mode, flight)
        ways = self._ways(flight)
        if not ways:
            raise UnavailableError("no decode worker can take requests")
        if flight.failover.is_turned_away:  # the other way is not there to take what this one has no room for
            return ways[0]
        return min(ways, key=lambda route: route.num_suspects(flight.failover.suspects))  # the first, if equal

    def _ways(self, flight: Flight) -> list[Route]:
        """What is possible in auto mode, the better one first."""
        ways = []
        for mode in (Mode.LOCAL, Mode.DISAGGREGATED):
            with suppress(UnavailableError):
                ways.append(self._route_in(mode, flight))
        decode = ways[0].decode if ways else None
        if decode is None or not self._prefers_local(flight, decode):
            ways.reverse()
        return ways

    def _prefers_local(self, flight: Flight, decode: Worker) -> bool:
        num_held = 0 if flight.owes_scores else self._num_held(flight, decode)  # it can't use what is held
        return self._rules.prefers_local(len(flight.known_tokens), num_held)

    def _route_in(self, mode: Mode, flight: Flight) -> Route:
        """Raises UnavailableError."""
        is_local = mode is Mode.LOCAL
        prefill = None if is_local else self._capable(Role.PREFILL, flight)
        decode = self._capable(Role.DECODE, flight) if is_local or flight.needs_decode else None
        suspects = flight.failover.suspects
        return choose(prefill, decode, self._flights.book, suspects, lambda worker: self._num_held(flight, worker))

    def _num_held(self, flight: Flight, worker: Worker) -> int:
        return self._flights.held.num_held(worker.ref, flight.chain, flight.known_tokens)

    def _capable(self, role: Role, flight: Flight) -> Sequence[Worker]:
        """A worker that has come later may take shorter requests only."""
        workers = self._cluster.capable(role, self._clock())
        return [worker for worker in workers if worker.limits.max_model_len >= flight.num_total]
