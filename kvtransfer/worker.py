"""The frame of every worker process: start up, loop, shut down. What the worker computes is its role's business.

A turn of the loop: take events in -> one step of the role -> report. Idle turns come at least every IDLE_WAIT_S, so
that leases are swept and `progress` moves while nothing is scheduled.

The loop ends with exit code
    0  after SIGTERM or SIGINT: the beats say `draining`, new requests are turned away, and running ones get
       `shutdown_timeout` seconds to end; what runs still, its gateway resumes elsewhere once it hears our Goodbye
    1  when all gateways refused us, the engine failed, or a thread that the worker can't live without has died
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvtransfer.control import AllGatewaysRefused, ControlEvent, FromGateway, GatewayLinks, GatewayLost, Report
from kvtransfer.incoming import KvOffered, ReceptionEnded
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Cancel, EndReason, Load, RequestEnd, RequestMessage, RequestOutput, ResetPrefixCache
from kvtransfer.outgoing import TransferEnded
from kvtransfer.signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.2

TransferEvent = TransferEnded | KvOffered | ReceptionEnded


@dataclass(frozen=True)
class StopRequested:
    """SIGTERM or SIGINT."""


@dataclass(frozen=True)
class Wake:
    """Something that a step waits for is there."""


WorkerEvent = ControlEvent | TransferEvent | StopRequested | Wake


class WorkerRole(Protocol):
    """What makes a worker a prefill or a decode worker."""

    def start(self) -> None:
        """Starts the threads that move KV."""
        ...

    def add(self, gateway: str, message: RequestMessage, now: float) -> None:
        """Takes a request in, or ends it at once; never raises on what a client sent."""
        ...

    def cancel(self, gateway: str, message: Cancel, now: float) -> None: ...

    def cancel_all_of(self, gateway: str, now: float) -> None: ...

    def reset_prefix_cache(self) -> None:
        """Nothing that is in the pool now is shared with what comes."""
        ...

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """A transfer has moved on, or has ended: then its blocks may be freed."""
        ...

    def step(self) -> bool:
        """One engine step with all that follows from it; False if there was nothing to compute."""
        ...

    def flush(self) -> Sequence[tuple[str, RequestOutput]]:
        """Carries out what the scheduler decided and returns what the gateways have to know, in order."""
        ...

    def load(self) -> Load: ...

    def is_empty(self) -> bool:
        """No request of any kind is held."""
        ...

    def check_integrity(self) -> None:
        """Asserts that the books of the block pool are right."""
        ...

    def is_alive(self) -> bool:
        """Whether all threads of the role still run."""
        ...

    def stop(self) -> None: ...


@dataclass
class Worker:
    """One worker process around a role."""

    role: WorkerRole
    links: GatewayLinks
    inbox: Mailbox[WorkerEvent]
    shutdown_timeout: float  # seconds
    clock: Callable[[], float] = time.monotonic
    _progress: int = 0
    _stop_at: float | None = None
    _refused: bool = False
    _failed: bool = False
    _busy: bool = False
    _is_checked: bool = True  # the books, since anything has happened

    def run(self) -> int:
        """Serves until told to stop; returns the exit code."""
        self.role.start()
        self.links.start()
        try:
            while not self._is_over(self.clock()):
                self.turn()
        except Exception:
            logger.exception("this worker's engine failed; giving up")
            self._failed = True
        return self._shut_down()

    def turn(self) -> None:
        """What is at hand, one step, a report."""
        for event in self.inbox.wait(0.0 if self._busy else IDLE_WAIT_S):
            self._on_event(event, self.clock())
        self._flush()
        self._busy = self.role.step()
        self._flush()
        self._after_turn()

    def _on_event(self, event: WorkerEvent, now: float) -> None:
        self._is_checked = False
        match event:
            case FromGateway(gateway, Cancel() as cancel):
                self.role.cancel(gateway, cancel, now)
            case FromGateway(_, ResetPrefixCache()):
                self.role.reset_prefix_cache()
            case FromGateway(gateway, message):
                self._on_request(gateway, message, now)
            case GatewayLost(gateway):
                self.role.cancel_all_of(gateway, now)
            case TransferEnded() | KvOffered() | ReceptionEnded():
                self.role.on_transfer(event, now)
            case AllGatewaysRefused():
                self._refused = True
            case Wake():
                pass  # the step that follows sees to it
            case StopRequested():
                self._stop_at = now + self.shutdown_timeout if self._stop_at is None else now

    def _on_request(self, gateway: str, message: RequestMessage, now: float) -> None:
        if self._stop_at is None:
            self.role.add(gateway, message, now)
            return
        assert not isinstance(message, Cancel | ResetPrefixCache), message
        spec = message.request
        end = RequestEnd(EndReason.FAILED, "the worker is shutting down")
        self.links.send(gateway, [RequestOutput(spec.request_id, spec.attempt, 0, end=end)])

    def _flush(self) -> None:
        by_gateway: dict[str, list[RequestOutput]] = {}
        for gateway, output in self.role.flush():
            by_gateway.setdefault(gateway, []).append(output)
        for gateway, outputs in by_gateway.items():
            self.links.send(gateway, outputs)

    def _after_turn(self) -> None:
        self._progress += 1
        self.links.report(Report(self._progress, self.role.load(), draining=self._stop_at is not None))
        if self.role.is_empty() and not self._is_checked:
            self.role.check_integrity()
            self._is_checked = True

    def _is_over(self, now: float) -> bool:
        if self._refused or not (self.links.is_alive() and self.role.is_alive()):
            return True
        return self._stop_at is not None and (now >= self._stop_at or self.role.is_empty())

    def _shut_down(self) -> int:
        if not (self.links.is_alive() and self.role.is_alive()):
            logger.error("a thread of this worker has died; giving up")
            self._failed = True
        well = not (self._failed or self._refused)
        self.links.leave("shutting down" if well else "failed")
        self.role.stop()
        return 0 if well else 1


def stop_on_signals(inbox: Mailbox[Any]) -> None:
    """From here on SIGTERM and SIGINT reach the worker's loop as events."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: inbox.put(StopRequested()))
