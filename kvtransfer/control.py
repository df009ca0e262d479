"""A worker's side of the control plane: says who it is, beats, hands requests in and outputs out. One thread.

1. Hello to each gateway, repeated until its Welcome. One that refuses us is asked again now and then; when all have,
   the engine is told and stops.
2. Welcome names the gateway's epoch. Another epoch later on, a message that is missing, or silence for `dead_after`
   seconds means that what the gateway had of ours can't be relied on: the engine gets GatewayLost and cancels its
   requests. Then Hello again. See `GatewayLink`.
3. A Heartbeat every interval carries what the engine last reported. The beat comes from this thread, so it proves only
   that the process lives; `progress` inside it proves that the engine does.
4. Requests that the engine can't take in, because its step is long or hangs, are answered here: OVERLOADED.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from kvtransfer.channel import ControlClient
from kvtransfer.complaints import Complaints
from kvtransfer.errors import MessageError
from kvtransfer.gateway_link import GatewayLink, LinkState
from kvtransfer.line_budget import MAX_LOGGED_CHARS, LineBudget
from kvtransfer.link_name import new_link_name
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    GatewayToWorker,
    Goodbye,
    Heartbeat,
    Hello,
    PrefillRequest,
    Refused,
    RequestMessage,
    ResetPrefixCache,
    StepOutput,
    SwitchRole,
    Welcome,
    WorkerToGateway,
)
from kvtransfer.parcels import parcels
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.worker_facts import LeaveCause, Load

logger = logging.getLogger(__name__)

MAX_PENDING_CANCELS = 4096
"""Cancellations that may wait for the engine beside the requests: a gateway says one for each request it has here."""


@dataclass(frozen=True)
class FromGateway:
    """A request or a cancellation for the engine."""

    gateway: str
    message: RequestMessage


@dataclass(frozen=True)
class GatewayLost:
    """The gateway that owned our requests is gone (silent, or restarted), or messages of it or for it are."""

    gateway: str


@dataclass(frozen=True)
class AllGatewaysRefused:
    """Nobody wants this worker: there is no gateway but has turned it down."""


ControlEvent = FromGateway | GatewayLost | AllGatewaysRefused


@dataclass(frozen=True)
class Report:
    """What the engine last said of itself; replaced as a whole, so that a reader sees one moment."""

    progress: int
    load: Load
    draining: bool = False


@dataclass(frozen=True)
class LinkTiming:
    """Seconds: between beats, and of silence after which a gateway is given up."""

    beat_interval: float
    dead_after: float


@dataclass(frozen=True)
class _Outgoing:
    gateway: str
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True)
class _Leave:
    reason: str
    cause: LeaveCause


class ControlWire(Protocol):
    """A worker's connections to its gateways, by their endpoints; see `ControlClient`."""

    def watch(self, mailbox: Mailbox[Any]) -> None: ...

    def poll(self, timeout: float) -> None: ...

    def receive(self) -> list[tuple[str, GatewayToWorker | MessageError]]: ...

    def send(self, gateway: str, message: WorkerToGateway) -> bool: ...

    def close(self) -> None: ...


@dataclass
class GatewayLinks:
    """Runs the control plane of one worker in a thread of its own.

    `inbox` takes what the engine has to know; while `max_pending` items wait there, new requests are turned away.
    `send` and `report` are safe from the engine's thread. `dial` connects to the gateways under a name.
    """

    hello: Hello
    gateways: Sequence[str]
    timing: LinkTiming
    inbox: Mailbox[Any]
    max_pending: int
    dial: Callable[[str, Sequence[str]], ControlWire] = ControlClient
    _outbox: Mailbox[_Outgoing | _Leave] = field(default_factory=Mailbox)
    _leaving: bool = False

    def __post_init__(self) -> None:
        self._report = Report(0, Load(0, 0, 0.0))
        self._links = {endpoint: GatewayLink(endpoint) for endpoint in self.gateways}
        self._complaints = Complaints()
        self._lines: LineBudget[str] = LineBudget()  # by gateway: one that comes and goes must not fill the log
        self._client = self.dial(new_link_name(self.hello.worker_id, self.hello.generation), self.gateways)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the control thread still runs: without it the engine must stop."""
        return self._thread.is_alive()

    def report(self, report: Report) -> None:
        """What the next heartbeats say."""
        self._report = report

    def send(self, gateway: str, outputs: Sequence[RequestOutput]) -> None:
        """All that one step has for one gateway."""
        self._outbox.put(_Outgoing(gateway, tuple(outputs)))

    def leave(self, reason: str, cause: LeaveCause, timeout: float = 2.0) -> None:
        """Says Goodbye to all gateways and ends the thread."""
        self._outbox.put(_Leave(reason, cause))
        self._thread.join(timeout)
        if not self.is_alive():
            self._outbox.close()

    def _run(self) -> None:
        self._client.watch(self._outbox)
        while not self._leaving:
            self._client.poll(self.timing.beat_interval / 4)
            self.turn(time.monotonic())
        self._client.close()

    def turn(self, now: float) -> None:
        """Messages at hand, in and out, and what is due; for the control thread alone."""
        for gateway, message in self._client.receive():
            self._on_message(self._links[gateway], message, now)
        for item in self._outbox.drain():
            self._on_outgoing(item, now)
        for link in self._links.values():
            self._on_tick(link, now)
        for endpoint, count in self._lines.take_unsaid(now):
            logger.warning("gateway %s: %d more lines about it", endpoint, count)

    def _on_message(self, link: GatewayLink, message: GatewayToWorker | MessageError, now: float) -> None:
        link.heard_at = now
        if isinstance(message, MessageError):  # if it was one that counts, its number will be missing
            if self._complaints.is_news(link.endpoint, "malformed message", now):
                self._log(logging.WARNING, link, f"sent a malformed message: {message}", now)
            return
        if (loss := link.loss_by(message)) is not None:
            self._lose(link, loss, now)
        match message:
            case Welcome():
                self._on_welcome(link, message, now)
            case Refused(reason):
                self._on_refused(link, reason, now)
            case PrefillRequest() | DecodeRequest() | Cancel() | ResetPrefixCache() | SwitchRole():
                if link.takes(message):
                    self._hand_in(link, message, now)

    def _on_welcome(self, link: GatewayLink, message: Welcome, now: float) -> None:
        if link.welcome(message, now):
            self._log(logging.INFO, link, "has registered this worker", now)
            self._complaints.settle(link.endpoint)

    def _on_refused(self, link: GatewayLink, reason: str, now: float) -> None:
        if link.refuse(reason, now):
            self._log(logging.ERROR, link, f"refuses this worker: {reason}", now)
            if all(other.state is LinkState.REFUSED for other in self._links.values()):
                self.inbox.put(AllGatewaysRefused())

    def _hand_in(self, link: GatewayLink, message: RequestMessage, now: float) -> None:
        """The engine empties its inbox once a step; until then the inbox must not grow without bound."""
        if isinstance(message, Cancel | ResetPrefixCache | SwitchRole):
            if self.inbox.backlog >= self.max_pending + MAX_PENDING_CANCELS:
                self._lose(link, "cancels faster than this worker can take in", now)
                return
        elif self.inbox.backlog >= self.max_pending:
            end = RequestEnd(EndReason.OVERLOADED, "the worker's inbox is full")
            refused = tuple(RequestOutput(spec.request_id, spec.attempt, 0, end=end) for spec in message.specs)
            self._send(link, refused, now)
            return
        link.has_given = True
        self.inbox.put(FromGateway(link.endpoint, message))

    def _log(self, level: int, link: GatewayLink, what: str, now: float) -> None:
        if self._lines.may_say(link.endpoint, now):
            logger.log(level, "gateway %s %.*s", link.endpoint, MAX_LOGGED_CHARS, what)

    def _lose(self, link: GatewayLink, why: str, now: float) -> None:
        """An engine that is busy hears of a loss only if it was given something since the one before: a gateway that
        comes and goes must not fill its inbox."""
        self._log(logging.WARNING, link, f"{why}: cancelling its requests", now)
        link.lose()
        if link.has_given or self.inbox.backlog < self.max_pending:
            link.has_given = False
            self.inbox.put(GatewayLost(link.endpoint))

    def _on_outgoing(self, item: _Outgoing | _Leave, now: float) -> None:
        if isinstance(item, _Outgoing):
            for part in parcels(item.outputs):
                self._send(self._links[item.gateway], part, now)
            return
        self._leaving = True
        for endpoint in self.gateways:
            self._client.send(endpoint, Goodbye(self.hello.generation, item.reason, item.cause))

    def _send(self, link: GatewayLink, outputs: tuple[RequestOutput, ...], now: float) -> None:
        """Nothing goes to a gateway that we aren't registered with: what it had here is cancelled, by both sides."""
        if not link.is_welcomed:
            return
        if self._client.send(link.endpoint, StepOutput(self.hello.generation, link.num_sent + 1, outputs)):
            link.num_sent += 1
        else:
            self._lose(link, "takes no more messages", now)

    def _on_tick(self, link: GatewayLink, now: float) -> None:
        if link.is_welcomed and now - link.heard_at > self.timing.dead_after:
            self._lose(link, f"has been silent for {self.timing.dead_after:g} s", now)
        if now < link.next_send or self._leaving:
            return
        if link.is_welcomed:
            self._beat(link, now)
            return
        self._client.send(link.endpoint, structs.replace(self.hello, introduction=link.introduction))
        link.hello_said(now)

    def _beat(self, link: GatewayLink, now: float) -> None:
        report = self._report
        beat = Heartbeat(self.hello.generation, link.num_sent, report.progress, report.load, report.draining)
        self._client.send(link.endpoint, beat)
        link.next_send = now + self.timing.beat_interval
