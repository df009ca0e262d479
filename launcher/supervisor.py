"""Keeps a set of child processes: starts them, restarts what dies, stops them all."""

import time
from collections.abc import Sequence
from typing import Final

from launcher.errors import LaunchError, RefusedByRoleError
from launcher.plan import ChildSpec
from launcher.process import ChildProcess
from launcher.terminal import Terminal

PATIENCE_S: Final = 4.0
"""From SIGTERM to SIGKILL."""
EXIT_SETTINGS: Final = 2
"""How a role ends whose settings are wrong."""
MAX_RESTARTS: Final = 5
HEALTHY_UPTIME_S: Final = 60.0
"""A process that lived for so long starts again with a clean record."""


class RestartBudget:
    """How often and how soon one process may be restarted. Knows no clock: delays of 1, 2, 4, 8, 16 s, then no more."""

    def __init__(self) -> None:
        self.used = 0

    def next_delay(self, uptime_s: float) -> float | None:
        """Seconds to wait before the next start of a process that lived for `uptime_s`; None: give up."""
        if uptime_s >= HEALTHY_UPTIME_S:
            self.used = 0
        if self.used == MAX_RESTARTS:
            return None
        self.used += 1
        return float(2 ** (self.used - 1))


class Supervisor:
    """All children of one `kvsplice serve`. Used by one thread, which calls `tick` a few times a second."""

    def __init__(self, specs: Sequence[ChildSpec], terminal: Terminal) -> None:
        self._terminal = terminal
        self._specs = {spec.name: spec for spec in specs}
        self._children: dict[str, ChildProcess] = {}
        self._budgets = {spec.name: RestartBudget() for spec in specs}
        self._restart_at: dict[str, float] = {}

    def start(self) -> None:
        for name, spec in self._specs.items():
            self._children[name] = ChildProcess(spec, self._terminal)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def check_all_alive(self) -> None:
        """Raises for a child that has ended: RefusedByRoleError with its error line if it did so over its settings,
        LaunchError with its last lines otherwise."""
        for child in self._children.values():
            if child.exit_code == EXIT_SETTINGS:
                raise RefusedByRoleError(_error_line(child))
            if child.exit_code is not None:
                lines = "".join(f"\n  {line}" for line in child.last_lines())
                raise LaunchError(f"{child.name} {child.how_it_ended} before it was ready; its last lines:{lines}")

    def tick(self, now: float) -> list[str]:
        """Notices deaths and starts what is due; returns what to tell the user. Raises LaunchError when a process has
        died too often."""
        news = [self._note_death(child, now) for child in self._children.values() if self._has_just_died(child)]
        for name in [name for name, due in self._restart_at.items() if due <= now]:
            del self._restart_at[name]
            self._children[name].wait(0.0)
            self._children[name] = ChildProcess(self._specs[name], self._terminal)
            news.append(f"{name} is started again")
        return news

    def _has_just_died(self, child: ChildProcess) -> bool:
        return child.exit_code is not None and child.name not in self._restart_at

    def _note_death(self, child: ChildProcess, now: float) -> str:
        delay = self._budgets[child.name].next_delay(now - child.started_at)
        if delay is None:
            raise LaunchError(f"{child.name} {child.how_it_ended} after {MAX_RESTARTS} restarts; giving up")
        self._restart_at[child.name] = now + delay
        count = self._budgets[child.name].used
        return f"{child.name} {child.how_it_ended}; starting it again in {delay:g} s ({count} of {MAX_RESTARTS})"

    def stop(self) -> None:
        """SIGTERM to all at once, SIGKILL to those that are still there after PATIENCE_S. All are gone on return."""
        children = list(self._children.values())
        for child in children:
            child.terminate()
        deadline = time.monotonic() + PATIENCE_S
        slow = [child for child in children if not child.wait(max(0.0, deadline - time.monotonic()))]
        for child in slow:
            child.kill()
        for child in slow:
            child.wait(PATIENCE_S)
        self._children.clear()


def _error_line(child: ChildProcess) -> str:
    """What the child said last, without the `PROG: error: ` in front."""
    last = child.last_lines()[-1:] or [f"{child.name} does not accept its settings"]
    return last[0].partition(": error: ")[2] or last[0]
