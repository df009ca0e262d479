"""Finds stop strings in text that comes in pieces, without ever showing a part of one.

    text so far   ........................ab          stop string: "abc"
                  |<----- may be shown ---->|<held>|

Held back is the longest end of the text that may still become a stop string: the state of one Knuth-Morris-Pratt
automaton a stop string (Knuth, Morris, Pratt: Fast pattern matching in strings, SIAM J. Comput. 6, 1977). The match
is the one that completes first, so that it does not depend on where pieces are cut.
"""

from collections.abc import Sequence


class StopMatcher:
    """Matches one non-empty stop string character by character."""

    def __init__(self, stop: str) -> None:
        assert stop, "a stop string must not be empty"
        self._stop = stop
        self._fallback = _fallbacks(stop)
        self.num_matched = 0  # length of the longest end of the text that begins the stop string

    def feed(self, char: str) -> bool:
        """Takes one more character; True if the stop string is complete with it. Not to be fed after that."""
        while self.num_matched and char != self._stop[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        if char == self._stop[self.num_matched]:
            self.num_matched += 1
        return self.num_matched == len(self._stop)


class StopScanner:
    """Scans one choice's text for any of its stop strings. Once `is_hit`, no more text comes out."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self.is_hit = False
        self._matchers = [StopMatcher(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes the next piece of text and returns what may be shown now."""
        if self.is_hit or not self._matchers:
            return "" if self.is_hit else piece
        for position, char in enumerate(piece):
            complete = [matcher.num_matched for matcher in self._matchers if matcher.feed(char)]
            if complete:
                return self._hit(self._held + piece[: position + 1], max(complete))
        text = self._held + piece
        cut = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text has ended: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _hit(self, text: str, stop_length: int) -> str:
        self.is_hit, self._held = True, ""
        return text if self._include_stop else text[: len(text) - stop_length]


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    fallbacks = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = fallbacks[length - 1]
        if stop[index] == stop[length]:
            length += 1
        fallbacks[index] = length
    return fallbacks
