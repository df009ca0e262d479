"""Connections as ZeroMQ over TCP makes them: ordered, never twice, and lossy where a connection breaks.

    Dialer (DEALER)  == to_listener ==>  Listener (ROUTER)       a `Connection` is a pair of `Lane`s
                     <== to_dialer ===

- A lane keeps the order. What is on its way waits while the path is blocked, as TCP would repeat it.
- A path that is blocked for longer than libzmq's heartbeats allow breaks the connection. So does the end of a process.
- A broken connection loses what was on its way. A dialer that queues while offline (KV) keeps some of the latest and
  sends it on the next connection, so that the loss lies in the middle; one that does not (control) refuses to send.
- The dialer comes back by itself, to whoever listens at the endpoint by then.
- A listener knows a connection by its dialer's name. A newcomer of the same name takes it over; what was unread of the
  former one is seen under a name that nobody can answer to.

Nothing is delivered twice or out of order within a connection: TCP has no such fault, and the protocol does not claim
to survive one. `tamper` may change the bytes of what is delivered, or swallow it, for protocols that detect it.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.timeline import Timeline

if TYPE_CHECKING:
    from tests.simulation.sockets import Dialer, Listener

Frames = list[bytes]

KV_STRAIN = 3.0  # KV comes in short bursts, beats all the time
HEARTBEAT_DEAD_S = (2.0, 2.6)


class Network:
    """All endpoints, and what is wrong between whom. `num_lost` counts messages that were swallowed."""

    def __init__(self, timeline: Timeline, latency: tuple[float, float], fragility: float) -> None:
        self.timeline = timeline
        self.rng = timeline.rng("network")
        self.num_lost = 0
        self.num_broken = 0
        self.connections: list[Connection] = []
        self.deaths: dict[tuple[str, str], float] = {}  # when which (host, generation) died
        self.tamper: Callable[[Frames], Frames | None] | None = None
        self._latency = latency
        self._fragility = fragility
        self._listeners: dict[str, Listener] = {}
        self._blocked: dict[tuple[str, str], float] = {}

    def latency(self) -> float:
        low, high = self._latency
        return low + (high - low) * self.rng.random() ** 4  # mostly short, with a tail

    def listen(self, listener: "Listener") -> None:
        self._listeners[listener.endpoint] = listener

    def unlisten(self, listener: "Listener") -> None:
        if self._listeners.get(listener.endpoint) is listener:
            del self._listeners[listener.endpoint]

    def listener_at(self, endpoint: str) -> "Listener | None":
        return self._listeners.get(endpoint)

    def blocked_until(self, source: str, target: str) -> float:
        return self._blocked.get((source, target), 0.0)

    def block(self, source: str, target: str, until: float) -> None:
        """Nothing gets from one host to another for a while."""
        self._blocked[source, target] = max(until, self.blocked_until(source, target))
        dead_at = self.timeline.now + self.rng.uniform(*HEARTBEAT_DEAD_S)
        if dead_at < until:
            for connection in self.between(source, target):
                self.timeline.at(dead_at, connection.break_off)

    def silence(self, host: str, until: float) -> None:
        """A stopped process answers no heartbeats: its connections break if that takes long."""
        dead_at = self.timeline.now + self.rng.uniform(*HEARTBEAT_DEAD_S)
        if dead_at < until:
            for connection in self.connections:
                if host in connection.hosts:
                    self.timeline.at(dead_at, connection.break_off)

    def strain(self, connection: "Connection") -> None:
        """A message has been sent on it: where there is traffic, a break does most harm."""
        odds = self._fragility * (KV_STRAIN if connection.dialer.queues_offline else 1.0)
        if odds and self.rng.random() < odds:
            self.timeline.after(self.latency(), connection.break_off)

    def heal(self) -> None:
        self._blocked.clear()
        self._fragility = 0.0

    def between(self, one: str, other: str) -> "list[Connection]":
        return [connection for connection in self.connections if connection.hosts == {one, other}]


class Lane:
    """One direction of a connection."""

    def __init__(
        self, connection: "Connection", source: str, target: str, hwm: int, deliver: Callable[["Lane", Frames], None]
    ) -> None:
        self.is_cut = False
        self.num_unread = 0
        self._connection, self._network = connection, connection.network
        self._source, self._target = source, target
        self._hwm = hwm
        self._deliver = deliver
        self._on_way: deque[tuple[float, Frames]] = deque()
        self._last_arrival = 0.0

    @property
    def has_room(self) -> bool:
        return len(self._on_way) + self.num_unread < self._hwm

    def send(self, frames: Frames) -> bool:
        if self.is_cut or not self.has_room:
            return False
        arrival = max(self._last_arrival, self._network.timeline.now + self._network.latency())
        self._last_arrival = arrival
        self._on_way.append((arrival, frames))
        if len(self._on_way) == 1:
            self._network.timeline.at(arrival, self._arrive)
        self._network.strain(self._connection)
        return True

    def _arrive(self) -> None:
        timeline = self._network.timeline
        if self.is_cut or not self._on_way:
            return
        blocked_until = self._network.blocked_until(self._source, self._target)
        if blocked_until > timeline.now:
            timeline.at(blocked_until, self._arrive)
            return
        while self._on_way and self._on_way[0][0] <= timeline.now:
            self.pass_on(self._on_way.popleft()[1])
        if self._on_way:
            timeline.at(self._on_way[0][0], self._arrive)

    def pass_on(self, frames: Frames) -> None:
        arrived = frames if self._network.tamper is None else self._network.tamper(frames)
        if arrived is None:
            self._network.num_lost += 1
            return
        self.num_unread += 1
        self._deliver(self, arrived)

    def cut(self) -> list[Frames]:
        """Ends the lane and returns what was on its way."""
        self.is_cut = True
        left, self._on_way = [frames for _, frames in self._on_way], deque()
        return left


class Connection:
    """A dialer's link to a listener, from the handshake to the break."""

    def __init__(self, network: Network, dialer: "Dialer", listener: "Listener") -> None:
        self.network = network
        self.dialer = dialer
        self.listener = listener
        self.hosts = {dialer.host, listener.host}
        self.name = dialer.name
        self.to_listener = Lane(self, dialer.host, listener.host, dialer.hwm, self._to_listener)
        self.to_dialer = Lane(self, listener.host, dialer.host, listener.hwm, dialer.take)
        network.connections.append(self)

    def _to_listener(self, lane: Lane, frames: Frames) -> None:
        self.listener.take(self, lane, frames)

    def break_off(self) -> None:
        """Both ends notice; what was on its way is lost, or was already in the other's buffers."""
        if self.to_listener.is_cut:
            return
        self.network.num_broken += 1
        kept = self._split(self.to_listener)
        self._split(self.to_dialer)
        self.network.connections.remove(self)
        self.listener.on_break(self)
        self.dialer.on_break(kept)

    def _split(self, lane: Lane) -> list[Frames]:
        """The first few get through, then some are lost; returns the rest, which was not sent yet."""
        rng, left = self.network.rng, lane.cut()
        through = rng.randint(0, len(left)) if rng.random() < 0.5 else 0
        for frames in left[:through]:
            lane.pass_on(frames)
        lost = rng.randint(through, len(left))
        self.network.num_lost += len(left) - through if not self.dialer.queues_offline else lost - through
        return left[lost:]

    def end_of(self, host: str) -> None:
        """The process at one end is gone. The other hears of it when the path allows."""
        other = self.listener.host if host == self.dialer.host else self.dialer.host
        blocked = self.network.blocked_until(host, other)
        delay = self.network.latency() if blocked <= self.network.timeline.now else HEARTBEAT_DEAD_S[1]
        self.network.timeline.after(delay, self.break_off)
