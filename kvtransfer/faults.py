"""Faults on purpose, so that tests can prove what a death at a certain moment does. Nothing happens unless one is set.

    --fault kill@spliced:2        SIGKILL to itself when the second request here reaches SPLICED
    KVSPLICE_FAULT=stop@running:1  SIGSTOP to itself; somebody else has to say SIGCONT

A fault happens once, in the thread that notices the event, and is logged before: a test can tell that it did happen.
"""

import ctypes
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeVar

from kvtransfer.codec import RequestKey
from kvtransfer.errors import SettingsError
from kvtransfer.request_parts import LifetimeEvent

logger = logging.getLogger(__name__)

Witness = Callable[[RequestKey, LifetimeEvent], None]
"""Is told the first time that a request reaches an event; may be told again."""

_Member = TypeVar("_Member", bound=Enum)
_FORM: Final = re.compile(r"([a-z-]+)@([a-z_]+):([1-9][0-9]{0,5})")


class FaultAction(Enum):
    """What happens to the process."""

    KILL = "kill"  # SIGKILL: it is gone without a word
    STOP = "stop"  # SIGSTOP: it lives, and does nothing
    DIE = "die"  # the engine's thread raises
    DIE_KV = "die-kv"  # the thread that moves KV raises
    DIE_CONTROL = "die-control"  # the thread of the control plane raises


_SIGNALS: Final[Mapping[FaultAction, signal.Signals]] = MappingProxyType(
    {FaultAction.KILL: signal.SIGKILL, FaultAction.STOP: signal.SIGSTOP}
)
_THREADS: Final[Mapping[FaultAction, str]] = MappingProxyType(
    {FaultAction.DIE: "MainThread", FaultAction.DIE_KV: "kv-", FaultAction.DIE_CONTROL: "control"}
)
"""How the names of the threads begin that raise."""


class InjectedFaultError(Exception):
    """Raised in a thread because a fault was asked for."""


@dataclass(frozen=True)
class FaultPlan:
    """`action` when the `count`-th request of this process reaches `event`."""

    action: FaultAction
    event: LifetimeEvent
    count: int

    @classmethod
    def parse(cls, text: str) -> "FaultPlan":
        """Reads ACTION@EVENT:N. Raises SettingsError."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise SettingsError(f"--fault must be ACTION@EVENT:N, as in kill@spliced:2, not {text[:64]!r}")
        action, event, count = form.groups()
        return cls(_member(FaultAction, "action", action), _member(LifetimeEvent, "event", event), int(count))

    def __str__(self) -> str:
        return f"{self.action.value}@{self.event.value}:{self.count}"


class Fault:
    """Counts the requests that reach the plan's event, and acts at the last of them, once. A `Witness`."""

    def __init__(self, plan: FaultPlan, act: Callable[[FaultAction], None]) -> None:
        self._plan = plan
        self._act = act
        self._reached: set[RequestKey] = set()
        self._has_happened = False

    def __call__(self, key: RequestKey, event: LifetimeEvent) -> None:
        if self._has_happened or event is not self._plan.event:
            return
        self._reached.add(key)
        if len(self._reached) < self._plan.count:
            return
        self._has_happened = True
        logger.critical("injected fault %s at request %s", self._plan, key[0])
        self._act(self._plan.action)


def unwatched(key: RequestKey, event: LifetimeEvent) -> None:
    """The witness where no fault is set."""


def witness_of(text: str | None) -> Witness:
    """What a worker tells of its requests' events; `text` is its `--fault`. Raises SettingsError."""
    return unwatched if text is None else Fault(FaultPlan.parse(text), strike)


def strike(action: FaultAction) -> None:
    """Does it to this process."""
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS[action]):
            _raise_in(thread)


def _raise_in(thread: threading.Thread) -> None:
    if thread is threading.current_thread():
        raise InjectedFaultError
    assert thread.ident is not None, thread
    # Takes effect when the thread runs Python code again: a blocked one wakes up for its next message or sweep.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(InjectedFaultError))


def _member(kind: type[_Member], what: str, value: str) -> _Member:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise SettingsError(f"--fault: the {what} must be one of {known}, not {value!r}") from None
