"""The decode workers that KV goes to, by worker id, and what was agreed with each at the handshake of its link. No
socket, tensor or clock; `now` is seconds, monotonic.

    unknown --dial--> dialled --KvWelcome--> welcome    a restart, a breach of the protocol or long idleness makes each
                         |                              of them unknown again, and so does a Refused behind KvWelcome,
                         +-----Refused-----> refused    or one with `again`, which means that it is worth another dial
"""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.errors import ProtocolError, SettingsError
from kvtransfer.kv_messages import KvHello, KvWelcome, PrefillToDecode
from kvtransfer.layout import KvBody
from kvtransfer.messages import DecodeTarget
from kvtransfer.worker_lines import WorkerLines

logger = logging.getLogger(__name__)


class KvOutlet(Protocol):
    """The links to decode workers, by worker id. Nothing here blocks."""

    def dial(self, peer: str, endpoint: str) -> None:
        """Opens a link; raises SettingsError for a bad endpoint."""
        ...

    def hang_up(self, peer: str) -> None: ...

    def send(self, peer: str, message: PrefillToDecode, body: KvBody | None = None) -> bool:
        """False if the queue to this peer is full."""
        ...

    def has_room(self, peer: str) -> bool:
        """Whether a send would be taken now."""
        ...


@dataclass
class LinkedTarget:
    """One of them. `refusal`: why it takes no KV; `wire_dtype`: what KV is packed into for it, if it is."""

    target: DecodeTarget
    used_at: float
    is_welcome: bool = False
    refusal: str | None = None
    wire_dtype: str | None = None


class TargetBook:
    """All of them. `hello` is the first word on each link; `fail_all` ends the transfers to a worker, with a reason."""

    def __init__(self, hello: KvHello, outlet: KvOutlet, fail_all: Callable[[str, str], None]) -> None:
        self._hello = hello
        self._outlet = outlet
        self._fail_all = fail_all
        self._targets: dict[str, LinkedTarget] = {}
        self._lines = WorkerLines(logger)

    def __len__(self) -> int:
        return len(self._targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def __getitem__(self, name: str) -> LinkedTarget:
        return self._targets[name]

    def dial(self, target: DecodeTarget, now: float) -> str | None:
        """Opens a link to `target` if there is none, and returns why it takes no KV, if so. A new generation replaces
        the old one's link."""
        known = self._targets.get(target.worker_id)
        if known is not None and known.target == target:
            known.used_at = known.used_at if known.refusal else now
            return known.refusal
        if known is not None:
            self.drop(target.worker_id, "the decode worker was restarted")
        try:
            self._outlet.dial(target.worker_id, target.kv_endpoint)
        except SettingsError as error:
            self._lines.say(logging.ERROR, target.worker_id, f"decode worker {target.worker_id}: {error}", now)
            return "the decode worker's KV address cannot be dialled"
        self._outlet.send(target.worker_id, self._hello)
        self._targets[target.worker_id] = LinkedTarget(target, now)
        return None

    def drop(self, name: str, reason: str) -> None:
        """Hangs up; the transfers to it have failed."""
        self._fail_all(name, reason)
        self._outlet.hang_up(name)
        del self._targets[name]

    def welcomed(self, name: str, welcome: KvWelcome, wire_dtype: str | None, now: float) -> None:
        """Behind the address may be another decode worker by now, which has no room reserved for what is meant for
        the one before. `wire_dtype`: what to pack KV into for the one that said `welcome`."""
        known = self._targets[name]
        if welcome.generation != known.target.generation:
            line = f"decode worker {name} is not the one that was meant: it was restarted"
            self._lines.say(logging.WARNING, name, line, now)
            self.drop(name, "the decode worker was restarted")
            return
        if known.is_welcome:
            return  # what was agreed on holds as long as the link
        known.is_welcome, known.wire_dtype = True, wire_dtype
        line = f"KV link to {name} is up, in {wire_dtype or self._hello.layout.dtype}"
        self._lines.say(logging.INFO, name, line, now)

    def refused(self, name: str, reason: str, now: float, *, again: bool) -> None:
        """At the handshake the first word holds; what follows answers what was sent behind KvHello. Later on, the
        other side has lost track of this link (it was cut, or its peer restarted): the next transfer dials anew."""
        known = self._targets[name]
        if known.refusal is not None:
            return
        self._lines.say(logging.ERROR, name, f"decode worker {name} refused our KV: {reason}", now)
        if again or known.is_welcome:
            self.drop(name, reason)
            return
        known.refusal = reason
        self._fail_all(name, reason)

    def broke_off(self, name: str, breach: ProtocolError, now: float) -> None:
        """It has broken the protocol, which costs it the link."""
        line = f"decode worker {name} broke the protocol, closing the link: {breach}"
        self._lines.say(logging.ERROR, name, line, now)
        self.drop(name, "the decode worker broke the protocol")

    def on_tick(self, now: float) -> None:
        """Tells the log what it was spared. To be called regularly."""
        self._lines.on_tick(now)

    def hang_up_idle(self, idle_since: float, busy: AbstractSet[str]) -> None:
        """Those that were not used since then and are not in `busy`: names of workers that a transfer goes to."""
        for name in [name for name, known in self._targets.items() if known.used_at < idle_since and name not in busy]:
            self.drop(name, "idle")
