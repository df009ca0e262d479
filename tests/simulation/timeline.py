"""Simulated time: a heap of events, and the only source of chance.

Everything that happens in a world is an event of its timeline. Two events of one moment happen in the order in which
they were asked for, and each component draws from a random stream of its own, so one seed makes one history, and a
component that draws once more does not shift what the others draw.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Timer:
    """One event to come."""

    when: float
    call: Callable[..., None]
    args: tuple[Any, ...]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


@dataclass
class Timeline:
    """`trace` holds (moment, who, what) of all that is worth telling."""

    seed: int
    now: float = 0.0
    trace: list[tuple[float, str, str]] = field(default_factory=list)
    num_events: int = 0
    _heap: list[tuple[float, int, Timer]] = field(default_factory=list)
    _num_made: int = 0

    def rng(self, component: str) -> random.Random:
        """A stream of its own for each name; seeded by text, so the same in every process."""
        return random.Random(f"{self.seed}/{component}")

    def clock(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(max(when, self.now), call, args)
        self._num_made += 1
        heapq.heappush(self._heap, (timer.when, self._num_made, timer))
        return timer

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> Timer:
        return self.at(self.now + delay, call, *args)

    def note(self, who: str, what: str) -> None:
        self.trace.append((self.now, who, what))

    def run_until(self, moment: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Lets events happen up to `moment`, or until `is_done`; returns whether it is done."""
        while self._heap and self._heap[0][0] <= moment:
            if is_done is not None and is_done():
                return True
            when, _, timer = heapq.heappop(self._heap)
            if not timer.is_cancelled:
                self.now = when
                self.num_events += 1
                timer.call(*timer.args)
        self.now = max(self.now, moment)
        return is_done is not None and is_done()
