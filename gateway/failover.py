"""Whether a request that has lost an attempt gets another one, and when. Knows no socket, clock or list of workers.

    what ended the attempt              nothing has reached the client         tokens have
    a worker is lost, or has failed     again                                  again
    a worker is overloaded              once, if there is another; else 429    again
    the request is refused, our bugs    an error                               an error

"Again" means: at once on other workers if there are any, after a growing delay on the same ones, and as soon as there
are workers at all; at most `max_retries` times, each within `timeout_s` seconds. Then the client gets one error.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gateway.backend import BackendError, RequestFailedError
from gateway.worker import WorkerRef
from kvtransfer.errors import SettingsError

SAME_WORKER_DELAY_S: Final = 0.25
"""Before the first retry on workers that there has been trouble with; doubles with each further one, up to the next."""
LONGEST_DELAY_S: Final = 2.0


class RetryReason(Enum):
    """Why an attempt ended before its request did. Labels of a metric, so this set is closed."""

    PREFILL_LOST = "prefill_lost"  # the prefill worker is gone, or messages of it are
    DECODE_LOST = "decode_lost"
    WORKER_STOPPED = "worker_stopped"  # a worker that was told to stop has left with the request unfinished
    ROLE_SWITCHED = "role_switched"  # or one that was told to take its other role
    FAILED = "failed"  # a worker could not go on: the KV did not come through, a lease ran out, it takes nothing new
    OVERLOADED = "overloaded"  # a worker has no room


class SetbackError(Exception):
    """An attempt is over and its request may not be. `error` is what the client gets if it is. `suspects` are workers
    that the next attempt had better not meet again. Its text is for the log: the error's, and what a worker said."""

    def __init__(
        self, reason: RetryReason, error: BackendError, suspects: Iterable[WorkerRef], told: str | None = None
    ) -> None:
        super().__init__(str(error) if told is None else f"{error}: {told}")
        self.reason = reason
        self.error = error
        self.suspects = frozenset(suspects)


@dataclass(frozen=True)
class FailoverSettings:
    """Bounds of what is tried for one request: further attempts, and seconds to wait for workers before each."""

    max_retries: int = 3
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.timeout_s < 0:
            raise SettingsError(f"retries and their timeout can't be negative: {self.max_retries}, {self.timeout_s}")


@dataclass(eq=False)
class Failover:
    """What one request has been through. `now` is seconds on the gateway's clock."""

    settings: FailoverSettings
    num_retries: int = 0
    suspects: set[WorkerRef] = field(default_factory=set)
    _setback: SetbackError | None = None
    _since: float = 0.0
    _is_pending: bool = False  # the next attempt has not begun yet
    _only_elsewhere: bool = False  # the client may still be told to come back later, which is the better answer

    def on_setback(self, setback: SetbackError, now: float, *, has_streamed: bool) -> BackendError | None:
        """The error that ends the request, or None if it gets another attempt."""
        self._setback, self._since = setback, now
        self.suspects |= setback.suspects
        is_turned_away = setback.reason is RetryReason.OVERLOADED and not has_streamed
        if is_turned_away and self._only_elsewhere:
            return setback.error
        self._only_elsewhere = is_turned_away
        if self.num_retries >= self.settings.max_retries:
            return self._after_all_retries(setback.error)
        self.num_retries += 1
        self._is_pending = True
        return None

    @property
    def is_turned_away(self) -> bool:
        """Whether a worker had no room for it, and the client may still be told so."""
        return self._only_elsewhere

    def begun(self) -> RetryReason | None:
        """An attempt is on its workers: why it was needed, None if it is the first."""
        was_pending, self._is_pending = self._is_pending, False
        return self._setback.reason if self._setback and was_pending else None

    def may_start(self, now: float, *, elsewhere: bool) -> bool:
        """Whether the next attempt may begin on workers that are there; `elsewhere`: none of them is a suspect."""
        if elsewhere:
            return True
        delay = min(LONGEST_DELAY_S, SAME_WORKER_DELAY_S * 2 ** (self.num_retries - 1))
        return not self._only_elsewhere and now >= self._since + delay

    def refusal(self, *, elsewhere: bool) -> BackendError | None:
        """The error of a request that was turned away and has no other worker to go to."""
        return self._setback.error if self._setback and self._only_elsewhere and not elsewhere else None

    def overdue(self, now: float) -> BackendError | None:
        """The error of a request that has waited too long for its next attempt."""
        if self._setback is None or now < self._since + self.settings.timeout_s:
            return None
        text = f"{self._setback.error}, and none took it over within {self.settings.timeout_s:g} s"
        return RequestFailedError(text)

    def _after_all_retries(self, error: BackendError) -> BackendError:
        return type(error)(f"{error}; given up after {self.num_retries} retries") if self.num_retries else error
