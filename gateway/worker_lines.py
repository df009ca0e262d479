"""What the gateway's log says of workers: that they come and go, and what is wrong with them. One that does so all the
time must not fill it, nor keep the lines of others from being said.

Knows no clock: `now` is seconds, monotonic.
"""

import logging
from typing import Final

from kvtransfer.line_budget import LineBudget

logger = logging.getLogger(__name__)

MAX_WORKERS: Final = 32
"""That have lines of their own in a period. Ids are chosen by who comes, so those beyond share theirs."""
MAX_LOGGED_CHARS: Final = 400
"""Of a line, part of which may be a worker's words."""
_OTHERS: Final = "(others)"  # no worker id may have parentheses


class WorkerLines:
    """The lines about workers, with a ceiling for each of them and for all."""

    def __init__(self) -> None:
        self._budget: LineBudget[str] = LineBudget()

    def say(self, level: int, worker_id: str, line: str, now: float) -> None:
        """`line` names the worker; nothing if there were too many about it."""
        if self.may_say(worker_id, now):
            logger.log(level, "%.*s", MAX_LOGGED_CHARS, line)

    def may_say(self, worker_id: str, now: float) -> bool:
        """Whether to log a line about this worker now; True is taken as a promise to do so."""
        has_own = worker_id in self._budget or len(self._budget) < MAX_WORKERS
        return self._budget.may_say(worker_id if has_own else _OTHERS, now)

    def on_tick(self, now: float) -> None:
        """Tells the log what it was spared. To be called regularly."""
        for worker_id, count in self._budget.take_unsaid(now):
            logger.warning("worker %r: %d more lines about it", worker_id, count)
