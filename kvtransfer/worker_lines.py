"""What a process's log says of the workers at the other end of its links: that they come and go, and what is wrong with
them. One that does so all the time must not fill it, nor keep the lines of others from being said.

    a worker that is or was let in    lines of its own, a few in a period
    whoever was never let in          one such share for all: ids are chosen by who comes

Knows no clock: `now` is seconds, monotonic.
"""

import logging
from typing import Final

from kvtransfer.complaints import Complaints
from kvtransfer.line_budget import MAX_LOGGED_CHARS, LineBudget

MAX_NAMED: Final = 64
"""Ends of KV links that have lines of their own in a period: as many as there usually are."""

_OTHERS: Final = "(others)"  # no worker id may have parentheses


class WorkerLines:
    """The lines about workers, with a ceiling for each of them and for all."""

    def __init__(self, log: logging.Logger, max_workers: int = MAX_NAMED, *, topic: str = "it") -> None:
        """`max_workers`: that may be live at once. So many have lines of their own in a period, and those that come
        beyond, as workers of ever new ids do, share theirs. `topic`: what of a worker the lines are about."""
        self._log = log
        self._max_workers = max_workers
        self._topic = topic
        self._budget: LineBudget[str] = LineBudget()
        self._complaints = Complaints()

    def say(self, level: int, worker_id: str, line: str, now: float) -> None:
        """Of a worker that is or was let in. `line` names it; nothing if there were too many about it."""
        has_own = worker_id in self._budget or len(self._budget) < self._max_workers
        self._say(level, worker_id if has_own else _OTHERS, line, now)

    def say_of_stranger(self, level: int, worker_id: str, line: str, now: float) -> None:
        """Of one that was not let in, whichever worker it says it is."""
        self._say(level, self._kind_of_stranger(worker_id), line, now)

    def say_joined(self, worker_id: str, line: str, now: float) -> None:
        """All is well with it: whatever it is refused for from now on is news."""
        self._complaints.settle(worker_id)
        self.say(logging.INFO, worker_id, line, now)

    def say_refused(self, worker_id: str, reason: str, now: float) -> None:
        """Once per worker and change, of one that comes again all the time. What there is no room for now is said when
        it does."""
        kind = self._kind_of_stranger(worker_id)
        if self._budget.has_room(kind) and self._complaints.is_news(worker_id, reason, now):
            self._say(logging.WARNING, kind, f"worker {worker_id!r} is refused: {reason}", now)

    def may_trace(self, worker_id: str, now: float) -> bool:
        """Whether to log a trace of what whoever has this id has said now; True is taken as a promise to do so."""
        return self._budget.may_say(self._kind_of_stranger(worker_id), now)

    def on_tick(self, now: float) -> None:
        """Tells the log what it was spared. To be called regularly."""
        for worker_id, count in self._budget.take_unsaid(now):
            self._log.warning("worker %r: %d more lines about %s", worker_id, count, self._topic)

    def _kind_of_stranger(self, worker_id: str) -> str:
        return worker_id if worker_id in self._budget else _OTHERS

    def _say(self, level: int, kind: str, line: str, now: float) -> None:
        """A line that nobody sees takes no other one's place."""
        if self._log.isEnabledFor(level) and self._budget.may_say(kind, now):
            self._log.log(level, "%.*s", MAX_LOGGED_CHARS, line)
