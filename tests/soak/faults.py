"""What happens to the processes while a soak runs: one thing at a time, and each must be recovered from."""

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tests.e2e.cluster import GATEWAY, Cluster
from tests.e2e.processes import wait_until

QUIET_S = (1.0, 4.0)
"""Between a recovery and the next fault, at random."""
STOPPED_S = (0.2, 4.0)
"""Short stops are not even noticed, long ones cost the worker its place."""
RECOVERS_WITHIN_S = 90.0
DRAINS_WITHIN_S = 20.0
"""Ten for what runs, which is the default, and as many to end."""


class Fault(Enum):
    """What is done to a process."""

    KILL = "killed"  # SIGKILL, started anew at once
    STOP = "stopped"  # SIGSTOP, SIGCONT some time later
    RESTART = "restarted"  # SIGTERM, started anew when it has ended


@dataclass(frozen=True)
class FaultEvent:
    """One fault and the seconds until /health said ready again."""

    role: str
    fault: Fault
    recovered_s: float


class Troublemaker:
    """Draws faults for `roles` until `deadline`, a moment of the monotonic clock."""

    def __init__(self, cluster: Cluster, roles: Sequence[str], rng: random.Random) -> None:
        self._cluster = cluster
        self._roles = roles
        self._rng = rng
        self.events: list[FaultEvent] = []

    def run(self, deadline: float) -> None:
        while True:
            pause = self._rng.uniform(*QUIET_S)
            if time.monotonic() + pause >= deadline:
                return
            time.sleep(pause)
            self._make(self._rng.choice(self._roles), self._rng.choice(list(Fault)))

    def _make(self, role: str, fault: Fault) -> None:
        start = time.monotonic()
        match fault:
            case Fault.KILL:
                self._cluster.kill(role)
                self._cluster.restart(role)
            case Fault.STOP:
                self._stop(role)
            case Fault.RESTART:
                self._restart(role)
        self._await_rejoined(role)
        self.events.append(FaultEvent(role, fault, time.monotonic() - start))

    def _stop(self, role: str) -> None:
        process = self._cluster[role]
        process.send(signal.SIGSTOP)
        wait_until(lambda: process.state == "T", within_s=5.0, what=f"{role} is stopped")
        time.sleep(self._rng.uniform(*STOPPED_S))
        process.send(signal.SIGCONT)

    def _restart(self, role: str) -> None:
        process = self._cluster[role]
        process.send(signal.SIGTERM)
        assert process.wait(DRAINS_WITHIN_S) == 0, f"{role} did not end well\n{process.tail()}"
        self._cluster.retire(role)
        self._cluster.restart(role)

    def _await_rejoined(self, role: str) -> None:
        """A killed worker is ready by its old life for a while, so its new one must have said that it is in."""
        process = self._cluster[role]
        if role != GATEWAY:
            wait_until(
                lambda: "has registered this worker" in process.output(),
                within_s=RECOVERS_WITHIN_S,
                what=f"{role} has registered",
            )
        self._cluster.wait_ready(RECOVERS_WITHIN_S)
