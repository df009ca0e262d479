"""Puts requests on workers: new ones, and those that have lost an attempt.

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
from gateway.router import Route, choose
from gateway.worker import Worker
from kvtransfer.messages import Role

logger = logging.getLogger(__name__)

UNREACHABLE = "it can't be reached"


class Placement:
    """`drop` gives a worker up, with a reason; `clock` gives seconds, monotonic."""

    def __init__(
        self, cluster: Cluster, flights: Flights, drop: Callable[[str, str], None], clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._flights = flights
        self._drop = drop
        self._clock = clock

    def launch(self, flight: Flight) -> None:
        """The first attempt. Raises UnavailableError if there is nobody for it: a client is told so, and does not
        wait."""
        while not self._start(flight, self._route(flight)):
            pass

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
                self._start(flight, route)

    def _start(self, flight: Flight, route: Route) -> bool:
        """False if one of the workers can't be reached; it is given up."""
        lost = self._flights.start(flight, route)
        if lost is not None:
            self._drop(lost.worker_id, UNREACHABLE)
        return lost is None

    def _route(self, flight: Flight) -> Route:
        """Raises UnavailableError."""
        prefill = self._capable(Role.PREFILL, flight)
        decode = self._capable(Role.DECODE, flight) if flight.needs_decode else None
        return choose(prefill, decode, self._flights.book, flight.failover.suspects)

    def _capable(self, role: Role, flight: Flight) -> Sequence[Worker]:
        """A worker that has come later may take shorter requests only."""
        workers = self._cluster.capable(role, self._clock())
        return [worker for worker in workers if worker.limits.max_model_len >= flight.num_total]
