"""Both ends of a control link count the messages that matter: a difference that stays is a loss nobody has noticed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.errors import require
from tests.simulation.gateway_node import GatewayNode, endpoint_of
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.worker_node import WorkerNode

NOTICE_S = 2.0
"""The connection comes back, and with it a beat."""


@dataclass
class Counts:
    """Looks at all links of a gateway after each of its turns."""

    network: Network
    nodes: Mapping[str, Process]
    _since: dict[tuple[str, str], tuple[Any, float]] = field(default_factory=dict)

    def check(self, gateway: GatewayNode) -> None:
        """What either has sent the other has taken, or it is on its way; while that is blocked nobody can know."""
        now = self.network.timeline.now
        for worker in gateway.cluster.workers:
            link = (gateway.title, f"{worker.worker_id}#{worker.generation}")
            node = self.nodes.get(worker.worker_id)
            ours, theirs = (worker.num_sent, worker.num_taken), self._of_worker(node, gateway)
            if ours == theirs or not self._can_talk(gateway, node):
                self._since.pop(link, None)
                continue
            known, since = self._since.get(link, ((ours, theirs), now))
            since = since if known == (ours, theirs) else now
            self._since[link] = ((ours, theirs), since)
            require(now - since < NOTICE_S, *link, "differ in what was sent and taken:", ours, theirs)

    def _of_worker(self, node: Process | None, gateway: GatewayNode) -> tuple[int, int]:
        """What it has taken and sent."""
        if not isinstance(node, WorkerNode):
            return (0, 0)
        link = node.links._links[endpoint_of(gateway.host)]
        return (link.num_taken, link.num_sent)

    def _can_talk(self, gateway: GatewayNode, node: Process | None) -> bool:
        now = self.network.timeline.now
        if node is None or not node.is_alive or max(node.paused_until, gateway.paused_until) > now - NOTICE_S:
            return False
        ways = ((node.host, gateway.host), (gateway.host, node.host))
        return bool(self.network.between(*ways[0])) and all(self.network.blocked_until(*way) <= now for way in ways)
