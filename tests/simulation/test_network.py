"""The simulated network keeps what TCP and ZeroMQ promise, and breaks what they don't."""

import pytest

from tests.simulation.network import Network
from tests.simulation.sockets import Dialer, Listener
from tests.simulation.timeline import Timeline

ENDPOINT = "tcp://b:1"


class Pair:
    """A dialer on host a, a listener on host b."""

    def __init__(self, seed: int = 1, hwm: int = 100, queues_offline: bool = True, name: str = "link") -> None:
        self.timeline = Timeline(seed)
        self.network = Network(self.timeline, (0.001, 0.1), fragility=0.0)
        self.num_wakes = 0
        self.queues_offline, self.hwm = queues_offline, hwm
        self.dialer = self.dial(name)
        self.listener = Listener(self.network, "b", ENDPOINT, 100, lambda: None)

    def dial(self, name: str) -> Dialer:
        options = {"hwm": self.hwm, "queues_offline": self.queues_offline, "wake": self.count}
        return Dialer(self.network, "a", name, ENDPOINT, **options)

    def count(self) -> None:
        self.num_wakes += 1

    def run(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now + seconds)

    def connected(self) -> "Pair":
        self.run(1.0)
        return self

    def heard(self) -> list[tuple[str, bytes]]:
        found = []
        while (received := self.listener.receive()) is not None:
            found.append((received[0], received[1][0]))
        return found


def numbers(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


def test_a_lane_keeps_the_order_whatever_each_message_takes():
    pair = Pair().connected()
    for number in numbers(50):
        assert pair.dialer.send([number])
    pair.run(10.0)
    assert pair.heard() == [("link", number) for number in numbers(50)]


def test_both_directions():
    pair = Pair().connected()
    assert pair.listener.send("link", [b"x"])
    assert not pair.listener.send("stranger", [b"x"])
    pair.run(1.0)
    assert pair.dialer.receive() == [b"x"]
    assert pair.dialer.receive() is None


def test_a_short_block_delays_and_loses_nothing():
    pair = Pair().connected()
    pair.network.block("a", "b", pair.timeline.now + 1.0)
    pair.dialer.send([b"x"])
    pair.run(0.9)
    assert pair.heard() == []
    pair.run(0.2)
    assert pair.heard() == [("link", b"x")]
    assert pair.network.num_broken == 0


def test_a_long_block_breaks_the_connection_and_the_dialer_comes_back():
    pair = Pair(queues_offline=False).connected()
    pair.network.block("b", "a", pair.timeline.now + 5.0)
    pair.run(4.0)
    assert pair.network.num_broken == 1
    assert not pair.dialer.send([b"x"])
    assert not pair.listener.send("link", [b"x"])
    pair.run(3.0)
    assert pair.dialer.send([b"y"])
    pair.run(1.0)
    assert pair.heard() == [("link", b"y")]


@pytest.mark.parametrize("seed", range(20))
def test_a_break_loses_a_stretch_of_what_was_on_its_way_and_no_more(seed):
    pair = Pair(seed).connected()
    for number in numbers(20):
        pair.dialer.send([number])
    pair.network.connections[0].break_off()
    pair.dialer.send([b"later"])
    pair.run(5.0)
    heard = [message for _, message in pair.heard()]
    assert heard[-1] == b"later"
    assert len(heard) + pair.network.num_lost == 21
    kept = heard[:-1]
    assert kept == sorted(kept)
    missing = sorted({*numbers(20)} - {*kept})
    assert missing == [bytes([missing[0][0] + index]) for index in range(len(missing))] if missing else True


def test_breaks_do_lose_something():
    lost = []
    for seed in range(20):
        pair = Pair(seed).connected()
        for number in numbers(20):
            pair.dialer.send([number])
        pair.network.connections[0].break_off()
        lost.append(pair.network.num_lost)
    assert max(lost) > 10
    assert min(lost) < 5


def test_a_full_queue_takes_no_more_until_it_is_read():
    pair = Pair(hwm=3).connected()
    wakes = pair.num_wakes
    assert [pair.dialer.send([number]) for number in numbers(4)] == [True, True, True, False]
    pair.run(2.0)
    assert not pair.dialer.has_room
    assert len(pair.heard()) == 3
    assert pair.num_wakes > wakes
    assert pair.dialer.has_room


def test_what_is_sent_before_the_connection_waits_for_it():
    pair = Pair()
    assert pair.dialer.send([b"x"])
    pair.run(2.0)
    assert pair.heard() == [("link", b"x")]


def test_a_newcomer_of_the_same_name_takes_over():
    pair = Pair().connected()
    pair.dialer.send([b"old"])
    pair.run(1.0)
    newcomer = pair.dial("link")
    pair.run(0.2)
    newcomer.send([b"new"])
    pair.run(1.0)
    pair.listener.send("link", [b"answer"])
    pair.run(1.0)
    assert ("?link", b"old") in pair.heard()
    assert newcomer.receive() == [b"answer"]


def test_the_dead_say_nothing_more():
    pair = Pair().connected()
    pair.dialer.close()
    assert not pair.dialer.send([b"x"])
    pair.run(5.0)
    assert pair.heard() == []
    assert not pair.listener.send("link", [b"x"])


def test_fragile_connections_break_with_traffic():
    pair = Pair()
    pair.network._fragility = 0.5
    pair.run(1.0)
    for number in numbers(20):
        pair.dialer.send([number])
    pair.run(5.0)
    assert pair.network.num_broken > 0


def test_bytes_may_be_tampered_with():
    pair = Pair().connected()
    pair.network.tamper = lambda frames: [frame + b"!" for frame in frames]
    pair.dialer.send([b"x"])
    pair.run(1.0)
    assert pair.heard() == [("link", b"x!")]
