"""What `gateway.cluster` makes of a message or of the passing of time: values, for whoever has requests and sockets."""

from dataclasses import dataclass

from gateway.worker import Worker
from kvtransfer.messages import GatewayToWorker
from kvtransfer.request_parts import RequestOutput
from kvtransfer.worker_facts import LeaveCause


@dataclass(frozen=True)
class Departure:
    """A worker is no longer live: whatever it had of ours is lost, or with a `cause` that was planned left to us."""

    worker: Worker
    reason: str
    cause: LeaveCause = LeaveCause.FAILURE


@dataclass(frozen=True)
class Reaction:
    """What a message led to. `outputs` come from `worker`, whose generation has been checked."""

    reply: GatewayToWorker | None = None
    departed: Departure | None = None
    joined: Worker | None = None
    worker: Worker | None = None
    outputs: tuple[RequestOutput, ...] = ()


@dataclass(frozen=True)
class Tick:
    """What the passing of time led to. `beat_to`: ids of the workers that are due a GatewayBeat."""

    departed: tuple[Departure, ...]
    stalled: tuple[Worker, ...]
    beat_to: tuple[str, ...]
