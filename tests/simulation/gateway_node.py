"""A gateway process: the real dispatcher, cluster and flights on a simulated event loop and socket."""

from typing import Any, Protocol

from gateway.cluster import Cluster, ClusterSettings
from gateway.dispatch import Dispatcher, DispatchSettings
from gateway.failover import FailoverSettings, RetryReason
from gateway.flight import FlightState
from gateway.modes import ModeRules
from gateway.observer import KvHandover, RequestOutcome
from kvtransfer.codec import RequestKey
from kvtransfer.link_name import worker_of
from tests.simulation.config import WorldConfig
from tests.simulation.errors import require
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.threads import SimLoop, Thread
from tests.simulation.wires import SimControlServer

LONG_S = 3600.0
"""Deadlines are kept out of the way: they would hide that a loss was not noticed."""


class GatewayWatch(Protocol):
    """Who checks what a gateway does."""

    def after_loop(self, node: "GatewayNode") -> None: ...

    def gateway_says(self, node: "GatewayNode", worker_id: str, message: Any) -> None: ...

    def gateway_hears(self, node: "GatewayNode", worker_id: str, message: Any) -> None: ...

    def request_ended(self, node: "GatewayNode", outcome: RequestOutcome) -> None: ...


class GatewayNode(Process):
    """One life of one gateway. Its clients run on its loop, and are lost with it."""

    def __init__(self, config: WorldConfig, network: Network, watch: GatewayWatch, host: str, life: int) -> None:
        super().__init__(network.timeline, host, life)
        self.watch = watch
        self.loop = SimLoop(self.timeline)
        self._thread = Thread(self.timeline, self._turn, self.lag, self.ready_at)
        self.loop.wake = self._thread.wake
        clusters = ClusterSettings(config.worker_dead_after, config.stalled_after, config.beat_interval)
        self.cluster = Cluster(f"epoch-{life}", clusters)
        settings = DispatchSettings(
            max_in_flight=config.max_in_flight,
            stream_buffer_tokens=config.stream_buffer_tokens,
            request_timeout_s=LONG_S,
            first_token_timeout_s=LONG_S,
            tick_s=config.tick,
            modes=ModeRules(local_threshold=config.local_threshold),
            failover=FailoverSettings(config.max_retries, config.failover_timeout),
        )
        self.dispatcher = Dispatcher(self.cluster, settings, self, self.timeline.clock)
        self.server = SimControlServer(network, host, endpoint_of(host), self.loop)
        self.server.on_send = lambda name, message: watch.gateway_says(self, worker_of(name), message)
        self.server.on_receive = lambda name, message: watch.gateway_hears(self, worker_of(name), message)

    def start(self) -> None:
        self.note("starts")
        self._task = self.loop.create_task(self.dispatcher.run(self.server))

    def die(self) -> None:
        """The sockets go first: nothing that is wound up behind them is heard of."""
        super().die()
        self.server.close()
        self.loop.bury()

    def keys_in_flight(self) -> set[RequestKey]:
        """Attempts that workers are at."""
        flights = self.dispatcher._flights._flights.values()
        return {flight.attempt.key for flight in flights if flight.state is not FlightState.WAITING}

    def on_retry(self, reason: RetryReason) -> None:
        self.note(f"retries: {reason.value}")

    def on_handover(self, handover: KvHandover) -> None: ...

    def on_request_end(self, outcome: RequestOutcome) -> None:
        if self.is_alive:
            self.watch.request_ended(self, outcome)

    def _turn(self) -> float:
        self.loop.run_ready()
        require(not self._task.done(), self.title, "stopped serving", self._task)
        self.watch.after_loop(self)
        return LONG_S


def endpoint_of(host: str) -> str:
    return f"tcp://{host}:8790"
