"""What an operator may do with the workers: see them, and switch the role of one. Knows no socket or clock.

A switch, as seen from here: the order goes out, and from that moment the worker gets no new requests. It finishes what
it has, or leaves it to others at the order's time limit, says Goodbye, and introduces itself anew in its new role, with
its model loaded as before. To the cluster that is another start of the same worker id.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gateway.backend import ConflictError, UnavailableError, UnknownWorkerError
from gateway.cluster import Cluster
from gateway.worker import Worker
from kvtransfer.messages import GatewayToWorker, SwitchRole
from kvtransfer.worker_facts import Load, Role


class WorkerState(Enum):
    """What becomes of new requests at a worker."""

    READY = "ready"  # it gets them
    STALLED = "stalled"  # its engine stands still; it gets none until it moves
    DRAINING = "draining"  # it finishes what it has, and leaves


@dataclass(frozen=True)
class WorkerReport:
    """One live worker as an operator sees it. `switching_to`: the role that this gateway has told it to take."""

    worker_id: str
    role: Role
    state: WorkerState
    switching_to: Role | None
    can_switch: bool
    load: Load


@dataclass(frozen=True)
class SwitchOrder:
    """`timeout_s`: what running requests get to end in, None: the worker's own; `force`: even if nobody else serves the
    role that the worker has."""

    role: Role
    timeout_s: float | None = None
    force: bool = False


class Administration(Protocol):
    """What the HTTP face needs for its operators."""

    def workers(self) -> tuple[WorkerReport, ...]:
        """All live workers, by id."""
        ...

    def switch(self, worker_id: str, order: SwitchOrder) -> WorkerReport:
        """The worker, told to take the role of `order`, or as it was if it has it.
        Raises UnknownWorkerError, ConflictError, UnavailableError."""
        ...


class Administrator(Administration):
    """The one behind the dispatcher. `send` is False where a worker can't be reached; `clock`: seconds, monotonic."""

    def __init__(
        self, cluster: Cluster, send: Callable[[str, GatewayToWorker], bool], clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._send = send
        self._clock = clock

    def workers(self) -> tuple[WorkerReport, ...]:
        return tuple(self._report(worker) for worker in self._cluster.workers)

    def switch(self, worker_id: str, order: SwitchOrder) -> WorkerReport:
        worker = self._live(worker_id)
        if worker.is_leaving:
            raise ConflictError("the worker drains: it is being switched, or shut down")
        if worker.role is order.role:
            return self._report(worker)
        self._check(worker, order)
        if not self._send(worker_id, SwitchRole(order.role, order.timeout_s)):
            raise UnavailableError("the worker can't be reached")
        self._cluster.note_switching(worker_id, order.role)
        return self._report(self._live(worker_id))

    def _live(self, worker_id: str) -> Worker:
        worker = self._cluster.find(worker_id)
        if worker is None:
            raise UnknownWorkerError("there is no worker of this id")
        return worker

    def _check(self, worker: Worker, order: SwitchOrder) -> None:
        """Raises ConflictError."""
        if not worker.can_switch:
            raise ConflictError("the worker's role is fixed; those started by `kvsplice worker` can be switched")
        others = [other for other in self._cluster.capable(worker.role, self._clock()) if other.ref != worker.ref]
        if not others and not order.force:
            raise ConflictError(f"no other {worker.role.value} worker can take requests; say force to switch it still")

    def _report(self, worker: Worker) -> WorkerReport:
        return WorkerReport(
            worker_id=worker.worker_id,
            role=worker.role,
            state=self._state(worker),
            switching_to=worker.switching_to,
            can_switch=worker.can_switch,
            load=worker.load,
        )

    def _state(self, worker: Worker) -> WorkerState:
        if worker.is_leaving:
            return WorkerState.DRAINING
        capable = self._cluster.capable(worker.role, self._clock())
        return WorkerState.READY if worker in capable else WorkerState.STALLED
