"""The frame of every worker process: start up, loop, shut down. What the worker computes is its role's business.

A turn of the loop: take events in -> one step of the role -> report. Idle turns come at least every IDLE_WAIT_S, so
that leases are swept and `progress` moves while nothing is scheduled.

The loop ends with exit code
    0  after SIGTERM or SIGINT: the beats say `draining`, new requests are turned away, and running ones get
       `shutdown_timeout` seconds to end; what runs still, its gateway resumes elsewhere once it hears our Goodbye
    1  when all gateways refused us, the engine failed, or a thread that the worker can't live without has died

It also ends when a gateway tells the worker to switch its role: it drains likewise, says Goodbye to all, and gives
every block back. Then `next_role` says what whoever runs it has to make of the same engine.
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
from kvtransfer.messages import Cancel, RequestMessage, ResetPrefixCache, SwitchRole
from kvtransfer.outgoing import TransferEnded
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.signals import STOP_SIGNALS
from kvtransfer.worker_facts import LeaveCause, Load, Role

logger = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.2
LOAD_INTERVAL_S: Final = 0.05
"""Between two looks at the load while steps are computed. One costs 0.2 ms with 256 requests, and beats are seldom."""
RELEASE_WITHIN_S: Final = 10.0
"""What the threads that move KV get to let go of blocks in, when a role is over."""

TransferEvent = TransferEnded | KvOffered | ReceptionEnded


@dataclass(frozen=True)
class StopRequested:
    """SIGTERM or SIGINT."""


@dataclass(frozen=True)
class Wake:
    """Something that a step waits for is there."""


WorkerEvent = ControlEvent | TransferEvent | StopRequested | Wake


@dataclass(frozen=True)
class _Ending:
    """The worker drains until `at`, seconds on its clock; `role`: what it is to be next, None if it shuts down."""

    at: float
    role: Role | None = None

    @property
    def reason(self) -> str:
        return "shutting down" if self.role is None else f"switching to {self.role.value}"

    @property
    def cause(self) -> LeaveCause:
        return LeaveCause.SHUTDOWN if self.role is None else LeaveCause.ROLE_SWITCH


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
    """One worker process around a role. `switches_from`: this role, if it can be told to take another."""

    role: WorkerRole
    links: GatewayLinks
    inbox: Mailbox[WorkerEvent]
    shutdown_timeout: float  # seconds
    clock: Callable[[], float] = time.monotonic
    switches_from: Role | None = None
    _progress: int = 0
    _ending: _Ending | None = None
    _refused: bool = False
    _failed: bool = False
    _busy: bool = False
    _is_checked: bool = True  # the books, since anything has happened
    _load: Load | None = None
    _load_due: float = 0.0

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

    @property
    def next_role(self) -> Role | None:
        """Once it has ended: the role that it was told to switch to, if it ended for that and well."""
        return None if self._ending is None or self._failed or self._refused else self._ending.role

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
            case FromGateway(gateway, SwitchRole() as order):
                self._on_switch(gateway, order, now)
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
                self._on_stop(now)

    def _on_stop(self, now: float) -> None:
        """A second signal ends the wait. One that comes amid a switch makes a shutdown of it."""
        is_second = self._ending is not None and self._ending.role is None
        self._ending = _Ending(now if is_second else now + self.shutdown_timeout)

    def _on_switch(self, gateway: str, order: SwitchRole, now: float) -> None:
        """The first order counts: another gateway may have sent its own before it saw this worker drain."""
        if self.switches_from is None:
            logger.error("gateway %s wants another role of a worker that can't switch", gateway)
        elif self._ending is None and order.role is not self.switches_from:
            timeout = self.shutdown_timeout if order.timeout_s is None else order.timeout_s
            logger.info("gateway %s switches this worker to %s", gateway, order.role.value)
            self._ending = _Ending(now + timeout, order.role)

    def _on_request(self, gateway: str, message: RequestMessage, now: float) -> None:
        if self._ending is None:
            self.role.add(gateway, message, now)
            return
        assert not isinstance(message, Cancel | ResetPrefixCache | SwitchRole), message
        end = RequestEnd(EndReason.FAILED, f"the worker is {self._ending.reason}")
        self.links.send(gateway, [RequestOutput(spec.request_id, spec.attempt, 0, end=end) for spec in message.specs])

    def _flush(self) -> None:
        by_gateway: dict[str, list[RequestOutput]] = {}
        for gateway, output in self.role.flush():
            by_gateway.setdefault(gateway, []).append(output)
        for gateway, outputs in by_gateway.items():
            self.links.send(gateway, outputs)

    def _after_turn(self) -> None:
        self._progress += 1
        self.links.report(Report(self._progress, self._recent_load(self.clock()), draining=self._ending is not None))
        if self.role.is_empty() and not self._is_checked:
            self.role.check_integrity()
            self._is_checked = True

    def _recent_load(self, now: float) -> Load:
        """That of this moment if nothing is being computed, else perhaps one of LOAD_INTERVAL_S ago."""
        if self._load is None or not self._busy or now >= self._load_due:
            self._load, self._load_due = self.role.load(), now + LOAD_INTERVAL_S
        return self._load

    def _is_over(self, now: float) -> bool:
        if self._refused or not (self.links.is_alive() and self.role.is_alive()):
            return True
        return self._ending is not None and (now >= self._ending.at or self.role.is_empty())

    def _shut_down(self) -> int:
        if not (self.links.is_alive() and self.role.is_alive()):
            logger.error("a thread of this worker has died; giving up")
            self._failed = True
        well = not (self._failed or self._refused)
        if well and self._ending is not None:
            self.links.leave(self._ending.reason, self._ending.cause)
        else:
            self.links.leave("failed", LeaveCause.FAILURE)
        if self.next_role is not None:
            self._release()
        self.role.stop()
        return 1 if self._failed or self._refused else 0

    def _release(self) -> None:
        """Ends what runs still, which its gateways resume elsewhere by now: the next role needs all of the pool."""
        try:
            for gateway in self.links.gateways:
                self.role.cancel_all_of(gateway, self.clock())
            self._wait_for_blocks(self.clock() + RELEASE_WITHIN_S)
            self.role.check_integrity()
        except Exception:
            logger.exception("this worker can't let go of its requests; giving up")
            self._failed = True

    def _wait_for_blocks(self, deadline: float) -> None:
        """Until no transfer touches a block any more."""
        self.role.flush()  # which tells the threads that move KV; nobody is left to be told the outputs
        while not self.role.is_empty():
            if self.clock() >= deadline or not self.role.is_alive():
                raise TimeoutError(f"requests still hold blocks: {self.role.load()}")
            for event in self.inbox.wait(IDLE_WAIT_S):
                if isinstance(event, TransferEvent):
                    self.role.on_transfer(event, self.clock())
                elif isinstance(event, StopRequested):
                    self._on_stop(self.clock())
                    return
            self.role.flush()


def stop_on_signals(inbox: Mailbox[Any]) -> None:
    """From here on SIGTERM and SIGINT reach the worker's loop as events."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: inbox.put(StopRequested()))
