"""Which complaints about a peer are worth a line in the log. A log has a ceiling, whoever sends what how fast.

Knows no clock: `now` is seconds, monotonic.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_SENDERS = 256
REPEAT_AFTER_S = 600.0
"""The same complaint about the same sender is news again after so long."""
CHANGE_AFTER_S = 10.0
"""Another complaint about the same sender is news after so long: one that keeps changing must not fill the log."""


@dataclass(frozen=True)
class _Said:
    complaint: str
    at: float


class Complaints:
    """Says a complaint once per sender and change; counts those that aren't said in `num_unsaid`.

    At most MAX_SENDERS are remembered; while they are, complaints about others are counted only.
    """

    def __init__(self) -> None:
        self.num_unsaid = 0
        self._said: OrderedDict[str | bytes, _Said] = OrderedDict()  # oldest first

    def is_news(self, sender: str | bytes, complaint: str, now: float) -> bool:
        """Whether to log `complaint` now; True is taken as a promise to do so."""
        self._forget_old(now)
        last = self._said.get(sender)
        if last is None:
            is_news = len(self._said) < MAX_SENDERS
        else:
            is_news = complaint != last.complaint and now - last.at >= CHANGE_AFTER_S
        if is_news:
            self._said[sender] = _Said(complaint, now)
            self._said.move_to_end(sender)
        else:
            self.num_unsaid += 1
        return is_news

    def settle(self, sender: str | bytes) -> None:
        """All is well with `sender`: whatever comes next is news."""
        self._said.pop(sender, None)

    def _forget_old(self, now: float) -> None:
        while self._said and now - next(iter(self._said.values())).at >= REPEAT_AFTER_S:
            self._said.popitem(last=False)
