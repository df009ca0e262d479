"""Where a dialled connection is: a state machine without socket or clock. `now` is seconds, monotonic.

    dialling  -----> up          the handshake is done
       ^ |            |
       | |            | cut: libzmq dials again by itself
       | |  <---------+
       | v
     given up                    refused for good, or MAX_FAILURES handshakes in quick succession have failed

libzmq never dials again after a refusal, and ten times a second for ever after a wrong server key. So what fails is
given up here, and dialled anew with a growing delay: by a socket of its own, as libzmq has no other way.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

MAX_FAILURES: Final = 3
"""Handshakes that may break off before the connection is given up: a server may be restarted meanwhile. One that has
been given up since it was last up gets a single one."""
SLOW_AFTER_S: Final = 2.0
"""Failures that are further apart are those of a server that stands still, not of one that turns us away: libzmq's own
timeout bounds their rate, and once the server goes on, so does the connection."""
FIRST_DELAY_S: Final = 0.25
MAX_DELAY_S: Final = 5.0


class LineState(Enum):
    """How far a connection is."""

    DIALLING = "dialling"  # or waiting until somebody listens: libzmq sees to it
    UP = "up"  # the handshake is done, messages flow
    GIVEN_UP = "given up"  # has no socket


_MOVES: Final[Mapping[LineState, frozenset[LineState]]] = types.MappingProxyType(
    {
        LineState.DIALLING: frozenset({LineState.UP, LineState.GIVEN_UP}),
        LineState.UP: frozenset({LineState.DIALLING}),
        LineState.GIVEN_UP: frozenset({LineState.DIALLING}),
    }
)


@dataclass
class Handshakes:
    """What has become of the handshakes of one connection."""

    state: LineState = LineState.DIALLING
    redial_at: float = 0.0  # where it is given up
    _num_failed: int = 0  # in a row, since this socket was made or last up
    _failed_at: float = float("-inf")
    _num_given_up: int = 0  # since it was last up

    def succeeded(self) -> None:
        self.cut()  # in case that wasn't told
        self._move(LineState.UP)
        self._num_failed = self._num_given_up = 0

    def cut(self) -> None:
        """The connection has ended. One that was not up has had its end told already."""
        if self.state is LineState.UP:
            self._move(LineState.DIALLING)

    def failed(self, now: float, *, is_refusal: bool) -> bool:
        """A handshake has failed; True if that is the end of this socket."""
        self.cut()
        self._num_failed = 1 if now - self._failed_at > SLOW_AFTER_S else self._num_failed + 1
        self._failed_at = now
        if not is_refusal and self._num_failed < (1 if self._num_given_up else MAX_FAILURES):
            return False
        self._move(LineState.GIVEN_UP)
        self.redial_at = now + min(MAX_DELAY_S, FIRST_DELAY_S * 2**self._num_given_up)
        self._num_given_up = min(self._num_given_up + 1, 16)
        return True

    def is_due(self, now: float) -> bool:
        """Whether it is time for another socket."""
        return self.state is LineState.GIVEN_UP and now >= self.redial_at

    def redialled(self) -> None:
        self._move(LineState.DIALLING)
        self._num_failed = 0

    def _move(self, state: LineState) -> None:
        assert state in _MOVES[self.state], f"{self.state.value} -> {state.value}"
        self.state = state
