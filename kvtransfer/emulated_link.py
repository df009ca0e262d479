"""A slower, longer or worse link to decode workers than there is, for experiments. No thread, socket or clock.

A message waits for the transmitter, takes its bytes / bandwidth to go through it, then is on its way for `delay`, and
then goes to the real outlet, unless it is lost:

    send |--- waits for the ones before ---|--- bytes / bandwidth ---|------ delay ------| real outlet, or lost
                                                                                         due

Only this way is emulated: what decode answers comes as fast as it really does. Lost are KV frames and first tokens; a
real link loses more rarely, and then (a cut TCP connection that comes back) any message. The order is kept.
"""

import random
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvtransfer.errors import SettingsError
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvFirstToken, KvHeader, PrefillToDecode
from kvtransfer.layout import KvBody
from kvtransfer.targets import KvOutlet

MAX_QUEUED: Final = 128
"""Messages to one peer, as many as a real link's queue has frames."""
QUEUE_BYTES: Final = 2 * MAX_BODY_BYTES
"""KV that waits for the transmitter; as a message is never cut, it may be almost twice as much. Beyond that comes what
is under way: bandwidth times delay."""
UNBOUNDED_PIPE_BYTES: Final = 64 << 20
"""KV on its way, at most, where no bandwidth is given."""

_NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
_SECONDS: Final = {"ms": 1e-3, "s": 1.0}
_BYTES_A_SECOND: Final = {"bit": 1 / 8, "Kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_EXAMPLE: Final = "delay=20ms,bandwidth=1Gbit,loss=0.01"


@dataclass(frozen=True)
class LinkSpec:
    """Seconds one way, bytes a second (None: as fast as it goes), and the part of messages that is lost."""

    delay: float = 0.0
    bandwidth: float | None = None
    loss: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "LinkSpec":
        """From `delay=20ms,bandwidth=1Gbit,loss=0.01`, each at most once. Raises SettingsError."""
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name in values or name not in _PARSERS:
                raise SettingsError(f"--kv-link takes delay, bandwidth and loss, each once, as in {_EXAMPLE}")
            values[name] = _PARSERS[name](value)
        return cls(**values)

    @property
    def pipe_bytes(self) -> float:
        """KV that is held back at once, at most."""
        if self.bandwidth is None:
            return UNBOUNDED_PIPE_BYTES
        return QUEUE_BYTES + self.bandwidth * self.delay


def _delay(text: str) -> float:
    value = _quantity("delay", text, _SECONDS)
    if value > MAX_DELAY_S:
        raise SettingsError(f"--kv-link: a delay of at most {MAX_DELAY_S:g} s")
    return value


def _bandwidth(text: str) -> float:
    value = _quantity("bandwidth", text, _BYTES_A_SECOND)
    if value < MIN_BYTES_A_SECOND:
        raise SettingsError("--kv-link: a bandwidth of at least 1Kbit")
    return value


def _loss(text: str) -> float:
    found = re.fullmatch(_NUMBER, text)
    if found is None or float(text) >= 1:
        raise SettingsError("--kv-link: loss is a number from 0 up to, but not, 1")
    return float(text)


MAX_DELAY_S: Final = 60.0
MIN_BYTES_A_SECOND: Final = 125.0
_PARSERS: Final = {"delay": _delay, "bandwidth": _bandwidth, "loss": _loss}


def _quantity(name: str, text: str, units: dict[str, float]) -> float:
    found = re.fullmatch(f"{_NUMBER}({'|'.join(units)})", text)
    if found is None:
        raise SettingsError(f"--kv-link: {name} is a number and one of {', '.join(units)}, as in {_EXAMPLE}")
    return float(found[1]) * units[found[2]]


@dataclass
class _Held:
    due: float
    message: PrefillToDecode
    body: KvBody | None
    is_lost: bool

    @property
    def num_bytes(self) -> int:
        return 0 if self.body is None else len(self.body.k) + len(self.body.v)


@dataclass
class _Pipe:
    held: deque[_Held] = field(default_factory=deque)
    num_bytes: int = 0
    free_at: float = 0.0  # when the transmitter is done with what is in
    is_blocked: bool = False  # the real outlet did not take what is due


class EmulatedLink(KvOutlet):
    """Stands before the real `outlet`. `advance` tells it the time, seconds, before anything is sent."""

    def __init__(self, spec: LinkSpec, outlet: KvOutlet, dice: random.Random) -> None:
        self._spec = spec
        self._outlet = outlet
        self._dice = dice
        self._pipes: dict[str, _Pipe] = {}
        self._now = 0.0
        self.num_lost = 0

    def dial(self, peer: str, endpoint: str) -> None:
        self._outlet.dial(peer, endpoint)
        self._pipes[peer] = _Pipe()

    def hang_up(self, peer: str) -> None:
        """What is on its way is gone with the link."""
        self._outlet.hang_up(peer)
        del self._pipes[peer]

    def has_room(self, peer: str) -> bool:
        pipe = self._pipes[peer]
        return len(pipe.held) < MAX_QUEUED and pipe.num_bytes < self._spec.pipe_bytes

    def send(self, peer: str, message: PrefillToDecode, body: KvBody | None = None) -> bool:
        if not self.has_room(peer):
            return False
        pipe = self._pipes[peer]
        held = _Held(0.0, message, body, self._is_lost(message))
        seconds = held.num_bytes / self._spec.bandwidth if self._spec.bandwidth else 0.0
        pipe.free_at = max(pipe.free_at, self._now) + seconds
        held.due = pipe.free_at + self._spec.delay
        pipe.held.append(held)
        pipe.num_bytes += held.num_bytes
        return True

    def _is_lost(self, message: PrefillToDecode) -> bool:
        return isinstance(message, KvHeader | KvFirstToken) and self._dice.random() < self._spec.loss

    def advance(self, now: float) -> None:
        """Passes on what is due."""
        self._now = now
        for peer, pipe in self._pipes.items():
            pipe.is_blocked = False
            while pipe.held and pipe.held[0].due <= now and not pipe.is_blocked:
                self._pass_on(peer, pipe)

    def _pass_on(self, peer: str, pipe: _Pipe) -> None:
        held = pipe.held[0]
        if not held.is_lost and not self._outlet.send(peer, held.message, held.body):
            pipe.is_blocked = True
            return
        self.num_lost += held.is_lost
        pipe.num_bytes -= held.num_bytes
        pipe.held.popleft()

    @property
    def next_due(self) -> float | None:
        """When there is something to pass on, None if nothing is held; a full outlet has its own wake-up."""
        dues = (pipe.held[0].due for pipe in self._pipes.values() if pipe.held and not pipe.is_blocked)
        return min(dues, default=None)
