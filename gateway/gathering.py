"""Choices of one prompt that begin together, so that it is computed and shipped once for all of them. Knows no worker.

Each choice is a request with a consumer of its own. The consumers start one after the other; the last one to come
launches all of their flights, and from then on each goes its own way.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

Flight = TypeVar("Flight")


class Gathering(Generic[Flight]):
    """Waits for `size` flights, and launches them: what it raises then, all of them raise. For one event loop."""

    def __init__(self, size: int) -> None:
        assert size > 0, size
        self._num_missing = size
        self._flights: list[Flight] = []
        self._begun = asyncio.Event()
        self._error: Exception | None = None

    async def join(self, flight: Flight, launch: Callable[[Sequence[Flight]], None]) -> None:
        """Returns once the flight has been launched with the others. Whoever is cancelled in here leaves: the others
        don't wait for it."""
        self._flights.append(flight)
        self._num_missing -= 1
        self._launch_if_complete(launch)
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            if not self._begun.is_set():
                self._flights.remove(flight)
                if self._flights:
                    self._launch_if_complete(launch)
            raise
        if self._error is not None:
            raise self._error

    @contextmanager
    def one_fate(self) -> Iterator[None]:
        """What is raised in here, before a flight can join, is raised for all."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

    def _launch_if_complete(self, launch: Callable[[Sequence[Flight]], None]) -> None:
        if self._num_missing > 0 or self._begun.is_set():
            return
        try:
            launch(self._flights)
        except Exception as error:  # noqa: BLE001  # raised by each that waits
            self._fail(error)
        self._begun.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._begun.set()
