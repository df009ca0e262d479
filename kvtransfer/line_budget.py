"""How many lines of a kind the log takes. What happens to each request, or again and again, has a ceiling there.

    | line, line, line, ... up to NUM_LINES | counted only ....... |  one line for those that were counted
    first of a kind                                     PERIOD_S later

Knows no clock: `now` is seconds, monotonic.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

NUM_LINES: Final = 10
PERIOD_S: Final = 10.0
MAX_LOGGED_CHARS: Final = 400
"""Of a line or of what it tells, part of which may be the words of whoever is at the other end."""

Kind = TypeVar("Kind", bound=Hashable)


@dataclass
class _Period:
    since: float
    num_said: int = 0
    num_unsaid: int = 0


class LineBudget(Generic[Kind]):
    """NUM_LINES of a kind in a period of PERIOD_S. Kinds are from a closed set, or whoever asks bounds how many have a
    period: none is forgotten within it."""

    def __init__(self) -> None:
        self._periods: dict[Kind, _Period] = {}

    def __len__(self) -> int:
        return len(self._periods)

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._periods

    def has_room(self, kind: Kind) -> bool:
        """Whether `may_say` would say True; asking takes nothing."""
        period = self._periods.get(kind)
        return period is None or period.num_said < NUM_LINES

    def may_say(self, kind: Kind, now: float) -> bool:
        """Whether to log a line of this kind now; True is taken as a promise to do so. `take_unsaid` ends periods."""
        period = self._periods.setdefault(kind, _Period(now))
        if not self.has_room(kind):
            period.num_unsaid += 1
            return False
        period.num_said += 1
        return True

    def take_unsaid(self, now: float) -> list[tuple[Kind, int]]:
        """Ends the periods that are over: the kinds, and how many lines of each weren't logged, if any. To be called
        regularly, and each told in a line."""
        over = {kind: period for kind, period in self._periods.items() if now - period.since >= PERIOD_S}
        for kind in over:
            del self._periods[kind]
        return [(kind, period.num_unsaid) for kind, period in over.items() if period.num_unsaid]
