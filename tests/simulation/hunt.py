"""Runs worlds one after another until time or seeds run out, or one is in trouble."""

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.simulation.errors import ViolationError
from tests.simulation.mutation import Mutation, applied
from tests.simulation.world import World

LINES_SHOWN = 40


@dataclass(frozen=True)
class Find:
    """A seed whose world broke an invariant, and the end of its history."""

    seed: int
    violation: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        again = f"python -m tests.simulation --seed {self.seed}"
        return "\n".join([*self.trace, f"seed {self.seed}: {self.violation}", f"replay: {again}"])


@dataclass(frozen=True)
class Hunt:
    """What a number of worlds came to."""

    num_worlds: int
    seconds: float
    find: Find | None


def run_seed(seed: int) -> Find | None:
    world = World(seed)
    try:
        world.run()
    except ViolationError as violation:
        return Find(seed, str(violation), tuple(shown(world)[-LINES_SHOWN:]))
    return None


def shown(world: World) -> list[str]:
    return [f"{at:8.3f}  {who:<12} {what}" for at, who, what in world.timeline.trace]


def hunt(seeds: Iterable[int], max_seconds: float = float("inf")) -> Hunt:
    """Stops at the first find. The clock is looked at between worlds, so at least one is run."""
    start, num_worlds = time.perf_counter(), 0
    with _less_collecting():
        for seed in seeds:
            find = run_seed(seed)
            num_worlds += 1
            seconds = time.perf_counter() - start
            if find is not None or seconds > max_seconds:
                return Hunt(num_worlds, seconds, find)
    return Hunt(num_worlds, time.perf_counter() - start, None)


def hunt_mutant(mutation: Mutation, seeds: Iterable[int], max_seconds: float = float("inf")) -> Hunt:
    with applied(mutation):
        return hunt(seeds, max_seconds)


@contextmanager
def _less_collecting() -> Iterator[None]:
    """What is imported by now stays: the collector need not look at it after every world."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
