"""What goes wrong in a world, and when. Each fault ends by itself, or with the healing."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tests.simulation.config import Climate, WorldConfig


class Fault(Enum):
    """One kind of trouble. Its targets are hosts."""

    BREAK = "break"  # the connections between two hosts break
    BLOCK_ONE_WAY = "block one way"  # nothing gets from one host to another
    BLOCK = "block"  # nor back
    CRASH = "crash"  # a worker is killed and comes back
    PAUSE = "pause"  # a worker is stopped and goes on
    SLOW = "slow"  # a worker takes longer for everything
    STOP = "stop"  # a worker is told to end, and comes back
    CRASH_GATEWAY = "crash gateway"  # a gateway is killed and comes back, in another epoch
    PAUSE_GATEWAY = "pause gateway"


OF_NETWORK = (Fault.BREAK, Fault.BLOCK_ONE_WAY, Fault.BLOCK)


@dataclass(frozen=True)
class Trouble:
    """A fault at a moment, for some seconds. `other` is the far host, where there is one."""

    fault: Fault
    at: float
    seconds: float
    host: str
    other: str | None = None

    def __str__(self) -> str:
        return " ".join([self.fault.value, self.host, self.other or "", f"for {self.seconds:.2f} s"])


def draw_troubles(rng: random.Random, config: WorldConfig, workers: list[str], gateways: list[str]) -> list[Trouble]:
    """At any time before the healing, as the requests are."""
    kinds = OF_NETWORK if config.climate is Climate.NETWORK else (*Fault, Fault.CRASH)
    return [_draw(rng, rng.choice(kinds), config, workers, gateways) for _ in range(config.num_faults)]


def _draw(rng: random.Random, fault: Fault, config: WorldConfig, workers: list[str], gateways: list[str]) -> Trouble:
    host = rng.choice(gateways if fault in (Fault.CRASH_GATEWAY, Fault.PAUSE_GATEWAY) else workers)
    other = rng.choice([name for name in workers + gateways if name != host]) if fault in OF_NETWORK else None
    if other is not None and rng.random() < 0.5:
        host, other = other, host
    seconds = rng.choice((rng.uniform(0.01, 0.5), rng.uniform(0.5, 2.0), rng.uniform(2.0, 8.0)))
    return Trouble(fault, rng.uniform(0.0, config.trouble_s), seconds, host, other)


Handlers = dict[Fault, Callable[[Trouble], None]]
