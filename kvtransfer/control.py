"""A worker's side of the control plane: says who it is, beats, hands requests in and outputs out. One thread.

1. Hello to each gateway, repeated until its Welcome. Refused: for good; the engine is told and stops.
2. Welcome names the gateway's epoch. Another epoch later on, or silence for `dead_after` seconds, means that the
   gateway which owned our requests is gone: the engine gets GatewayLost and cancels them. Then Hello again.
3. A Heartbeat every interval carries what the engine last reported. The beat comes from this thread, so it proves only
   that the process lives; `progress` inside it proves that the engine does.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.channel import ControlClient
from kvtransfer.errors import MessageError
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    GatewayBeat,
    GatewayToWorker,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    PrefillRequest,
    Refused,
    Reintroduce,
    RequestOutput,
    StepOutput,
    Welcome,
)

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.25
RequestMessage = PrefillRequest | DecodeRequest | Cancel


@dataclass(frozen=True)
class FromGateway:
    """A request or a cancellation for the engine."""

    gateway: str
    message: RequestMessage


@dataclass(frozen=True)
class GatewayLost:
    """The gateway that owned our requests is gone (silent, or restarted)."""

    gateway: str


@dataclass(frozen=True)
class LinkRefused:
    """A gateway turned this worker down; `reason` says what differs."""

    gateway: str
    reason: str


ControlEvent = FromGateway | GatewayLost | LinkRefused


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


@dataclass
class _Gateway:
    endpoint: str
    epoch: str | None = None  # None: not welcomed
    last_heard: float = 0.0
    next_send: float = 0.0  # of a Hello or a Heartbeat


@dataclass(frozen=True)
class _Outgoing:
    gateway: str
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True)
class _Leave:
    reason: str


@dataclass
class GatewayLinks:
    """Runs the control plane of one worker in a thread of its own.

    `inbox` takes what the engine has to know. `send` and `report` are safe from the engine's thread.
    """

    hello: Hello
    gateways: Sequence[str]
    timing: LinkTiming
    inbox: Mailbox[Any]
    _outbox: Mailbox[_Outgoing | _Leave] = field(default_factory=Mailbox)
    _leaving: bool = False

    def __post_init__(self) -> None:
        self._report = Report(0, Load(0, 0, 0.0))
        self._states = {endpoint: _Gateway(endpoint) for endpoint in self.gateways}
        self._client = ControlClient(self.hello.worker_id, self.gateways)
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

    def leave(self, reason: str, timeout: float = 2.0) -> None:
        """Says Goodbye to all gateways and ends the thread."""
        self._outbox.put(_Leave(reason))
        self._thread.join(timeout)

    def _run(self) -> None:
        self._client.watch(self._outbox)
        while not self._leaving:
            self._client.poll(self.timing.beat_interval / 4)
            now = time.monotonic()
            for gateway, message in self._client.receive():
                self._on_message(self._states[gateway], message, now)
            for item in self._outbox.drain():
                self._on_outgoing(item)
            for state in self._states.values():
                self._on_tick(state, now)
        self._client.close()

    def _on_message(self, state: _Gateway, message: GatewayToWorker | MessageError, now: float) -> None:
        state.last_heard = now
        match message:
            case MessageError():
                logger.warning("gateway %s sent a malformed message: %s", state.endpoint, message)
            case Welcome(epoch):
                self._on_welcome(state, epoch)
            case GatewayBeat(epoch):
                if state.epoch is not None and epoch != state.epoch:
                    self._lose(state, "was restarted")
            case Reintroduce():
                self._lose(state, "does not know us")
            case Refused(reason):
                logger.error("gateway %s refused this worker: %s", state.endpoint, reason)
                self.inbox.put(LinkRefused(state.endpoint, reason))
            case PrefillRequest() | DecodeRequest() | Cancel():
                self.inbox.put(FromGateway(state.endpoint, message))

    def _on_welcome(self, state: _Gateway, epoch: str) -> None:
        if state.epoch == epoch:
            return
        if state.epoch is not None:
            self._lose(state, "was restarted")
        logger.info("registered with gateway %s", state.endpoint)
        state.epoch = epoch

    def _lose(self, state: _Gateway, why: str) -> None:
        if state.epoch is None:
            return
        logger.warning("gateway %s %s: cancelling its requests", state.endpoint, why)
        state.epoch = None
        state.next_send = 0.0
        self.inbox.put(GatewayLost(state.endpoint))

    def _on_outgoing(self, item: _Outgoing | _Leave) -> None:
        if isinstance(item, _Leave):
            self._leaving = True
            for endpoint in self.gateways:
                self._client.send(endpoint, Goodbye(self.hello.generation, item.reason))
            return
        if not self._client.send(item.gateway, StepOutput(self.hello.generation, item.outputs)):
            self._lose(self._states[item.gateway], "takes no more messages")

    def _on_tick(self, state: _Gateway, now: float) -> None:
        if state.epoch is not None and now - state.last_heard > self.timing.dead_after:
            self._lose(state, f"has been silent for {self.timing.dead_after:g} s")
        if now < state.next_send or self._leaving:
            return
        if state.epoch is None:
            self._client.send(state.endpoint, self.hello)
            state.next_send = now + HELLO_INTERVAL_S
            return
        report = self._report
        beat = Heartbeat(self.hello.generation, report.progress, report.load, report.draining)
        self._client.send(state.endpoint, beat)
        state.next_send = now + self.timing.beat_interval
