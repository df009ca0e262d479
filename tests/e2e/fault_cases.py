"""Which faults are tried: each action at each event of a request's life, on each role that records it; new events come
in by themselves, as they are read from the source. And how a fault is proven to have happened."""

import ast
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.faults import FaultAction, FaultPlan
from kvtransfer.request_parts import LifetimeEvent
from tests.e2e.cluster import DECODE, GATEWAY, PREFILL
from tests.e2e.processes import REPOSITORY, RoleProcess

NTH = 3
"""The fault comes with the third request of six that reaches the event: some are past it, some before."""
LOCAL_ONLY = frozenset({(DECODE, LifetimeEvent.FIRST_TOKEN)})
"""Reached only where decode computes the prompt itself; all others where it does not."""
_RECORDS = re.compile(r"\brecord\(\s*LifetimeEvent\.(\w+)")
_DEATH_NOTICES = {
    FaultAction.DIE: "this worker's engine failed",
    FaultAction.DIE_KV: "a thread of this worker has died",
    FaultAction.DIE_CONTROL: "a thread of this worker has died",
}


@dataclass(frozen=True)
class FaultCase:
    """`event` is None for the gateway, which records none: it gets its signal from outside amid the load."""

    role: str
    action: FaultAction
    event: LifetimeEvent | None

    def __str__(self) -> str:
        moment = "amid-load" if self.event is None else self.event.value
        return f"{self.role}-{self.action.value}-{moment}"

    @property
    def flags(self) -> tuple[str, ...]:
        """What the role is started with."""
        return () if self.event is None else ("--fault", str(FaultPlan(self.action, self.event, NTH)))

    @property
    def mode(self) -> str:
        """Where the prompts of its load are computed."""
        return "local" if (self.role, self.event) in LOCAL_ONLY else "disaggregated"

    def has_begun(self, process: RoleProcess) -> bool:
        """Whether the process has logged what it is about to do to itself."""
        return self.event is not None and f"injected fault {self.flags[1]} at request" in process.output()

    def has_happened(self, process: RoleProcess) -> bool:
        """Whether the kernel and, if the process did it to itself, its own log say so."""
        if self.event is not None and not self.has_begun(process):
            return False
        if self.action is FaultAction.KILL:
            return process.exit_code == -signal.SIGKILL
        if self.action is FaultAction.STOP:
            return process.exit_code is None and process.state == "T"
        return process.exit_code == 1 and _DEATH_NOTICES[self.action] in process.output()


def events_recorded_by(role: str) -> frozenset[LifetimeEvent]:
    """The events that the source of this role records, and what of the engine it imports."""
    files = list((REPOSITORY / role).glob("*.py"))
    for path in files:  # grows on the way
        files += [found for found in _imported_of_engine(path) if found not in files]
    return frozenset(LifetimeEvent[name] for path in files for name in _recorded(path))


def _imported_of_engine(path: Path) -> list[Path]:
    modules = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [REPOSITORY / f"{name.replace('.', '/')}.py" for name in modules if name.startswith("engine.")]


def _recorded(path: Path) -> list[str]:
    return _RECORDS.findall(path.read_text())


def cases_of(action: FaultAction) -> list[FaultCase]:
    """One case for each role and event, in the order of a request's life; and one of the gateway for a signal."""
    recorded = {role: events_recorded_by(role) for role in (PREFILL, DECODE)}
    cases = [FaultCase(role, action, event) for role in recorded for event in LifetimeEvent if event in recorded[role]]
    if action in (FaultAction.KILL, FaultAction.STOP):
        cases.append(FaultCase(GATEWAY, action, None))
    return cases


ALL_CASES = tuple(case for action in FaultAction for case in cases_of(action))
