"""What leaves for the workers. What a worker must not miss has a number, from its Welcome on; a reply goes to whoever
has spoken, live or not. Nothing leaves while the control plane is down."""

from typing import Protocol

from gateway.cluster import Cluster
from kvtransfer.errors import MessageError
from kvtransfer.messages import GatewayToWorker, RequestMessage, WorkerToGateway


class ControlLink(Protocol):
    """The gateway's end of the control channel."""

    async def receive(self) -> tuple[str, WorkerToGateway | MessageError]:
        """The next message with the name of the connection it came on, or what was wrong with it."""
        ...

    def send(self, name: str, message: GatewayToWorker) -> bool:
        """False if there is no connection of this name or its queue is full."""
        ...


class WorkerOutlet:
    """The way to the workers of `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._control: ControlLink | None = None

    @property
    def is_open(self) -> bool:
        return self._control is not None

    def open(self, control: ControlLink) -> None:
        assert self._control is None, "this gateway has a control channel already"
        self._control = control

    def close(self) -> None:
        self._control = None

    def send(self, worker_id: str, message: GatewayToWorker) -> bool:
        """Numbers what a live worker must not miss; one that isn't live gets none of it."""
        link = self._cluster.link_to(worker_id)
        if self._control is None or link is None:
            return False
        if not isinstance(message, RequestMessage):
            return self._control.send(link, message)
        numbered = self._cluster.numbered(worker_id, message)
        if numbered is None or not self._control.send(link, numbered):
            return False
        self._cluster.note_sent(worker_id)
        return True

    def reply(self, sender: str, reply: GatewayToWorker) -> None:
        """On the connection that was spoken on, whoever is live under that worker id."""
        if self._control is not None:
            self._control.send(sender, reply)
