"""The two ends of a connection: a DEALER that dials, and a ROUTER that listens. See `tests/simulation/network.py`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.network import Connection, Frames, Lane, Network

RECONNECT_S = (0.1, 0.6)


@dataclass
class Received:
    """A message that waits to be read, and the lane that it takes up room in."""

    lane: Lane
    frames: Frames


class Dialer:
    """Stands for a DEALER that connects, and connects again. `wake`: something to read, or room to send."""

    def __init__(
        self,
        network: Network,
        host: str,
        name: str,
        endpoint: str,
        *,
        hwm: int,
        queues_offline: bool,
        wake: Callable[[], None],
    ) -> None:
        self.host = host
        self.name = name
        self.endpoint = endpoint
        self.hwm = hwm
        self.queues_offline = queues_offline
        self.inbox: deque[Received] = deque()
        self._network = network
        self._wake = wake
        self._connection: Connection | None = None
        self._pending: deque[Frames] = deque()
        self._is_closed = False
        network.timeline.after(network.latency(), self._connect)

    @property
    def has_room(self) -> bool:
        if self._is_closed:
            return False
        if self._connection is not None:
            return self._connection.to_listener.has_room
        return self.queues_offline and len(self._pending) < self.hwm

    def send(self, frames: Frames) -> bool:
        if not self.has_room:
            return False
        if self._connection is not None:
            return self._connection.to_listener.send(frames)
        self._pending.append(frames)
        return True

    def receive(self) -> Frames | None:
        return _read(self.inbox)

    def take(self, lane: Lane, frames: Frames) -> None:
        self.inbox.append(Received(lane, frames))
        self._wake()

    def made_room(self) -> None:
        self._wake()

    def _connect(self) -> None:
        if self._is_closed or self._connection is not None:
            return
        timeline, listener = self._network.timeline, self._network.listener_at(self.endpoint)
        if listener is None or self._is_blocked(listener):
            timeline.after(self._network.rng.uniform(*RECONNECT_S), self._connect)
            return
        self._connection = Connection(self._network, self, listener)
        listener.admit(self._connection)
        while self._pending and self._connection.to_listener.send(self._pending[0]):
            self._pending.popleft()
        self._wake()

    def _is_blocked(self, listener: "Listener") -> bool:
        hosts, now = (self.host, listener.host), self._network.timeline.now
        return any(self._network.blocked_until(*way) > now for way in (hosts, hosts[::-1]))

    def on_break(self, unsent: list[Frames]) -> None:
        self._connection = None
        if self._is_closed:
            return
        if self.queues_offline:
            self._pending.extend(unsent)
        self._network.timeline.after(self._network.rng.uniform(*RECONNECT_S), self._connect)

    def close(self) -> None:
        """Whatever is still to be sent goes with it, or not."""
        self._is_closed = True
        self._pending.clear()
        if self._connection is not None:
            self._connection.end_of(self.host)


class Listener:
    """Stands for a ROUTER. Messages come with the name of their connection."""

    def __init__(self, network: Network, host: str, endpoint: str, hwm: int, wake: Callable[[], None]) -> None:
        self.host = host
        self.endpoint = endpoint
        self.hwm = hwm  # messages to one dialer
        self.wake = wake
        self.inbox: deque[tuple[Connection, Received]] = deque()
        self._network = network
        self._by_name: dict[str, Connection] = {}
        self._is_closed = False
        network.listen(self)

    def admit(self, connection: Connection) -> None:
        former = self._by_name.get(connection.name)
        self._by_name[connection.name] = connection
        if former is not None:
            former.name = f"?{former.name}"
            former.break_off()

    def send(self, name: str, frames: Frames) -> bool:
        connection = self._by_name.get(name)
        return not self._is_closed and connection is not None and connection.to_dialer.send(frames)

    def receive(self) -> tuple[str, Frames] | None:
        if not self.inbox:
            return None
        connection, received = self.inbox.popleft()
        _make_room(received.lane, connection.dialer)
        return connection.name, received.frames

    def take(self, connection: Connection, lane: Lane, frames: Frames) -> None:
        if not self._is_closed:
            self.inbox.append((connection, Received(lane, frames)))
            self.wake()

    def on_break(self, connection: Connection) -> None:
        if self._by_name.get(connection.name) is connection:
            del self._by_name[connection.name]

    def close(self) -> None:
        self._is_closed = True
        self._network.unlisten(self)
        for connection in list(self._by_name.values()):
            connection.end_of(self.host)


def _read(inbox: deque[Received]) -> Frames | None:
    if not inbox:
        return None
    received = inbox.popleft()
    received.lane.num_unread -= 1
    return received.frames


def _make_room(lane: Lane, dialer: Dialer) -> None:
    was_full = not lane.has_room
    lane.num_unread -= 1
    if was_full:
        dialer.made_room()
