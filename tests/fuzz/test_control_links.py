"""A worker's control plane, spoken to by gateways that lie: `GatewayLinks.turn` without a thread or a socket."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.codec import encode
from kvtransfer.complaints import MAX_SENDERS
from kvtransfer.control import MAX_PENDING_CANCELS, FromGateway, GatewayLinks, GatewayLost, LinkTiming
from kvtransfer.gateway_link import HELLO_INTERVAL_S
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    Cancel,
    GatewayBeat,
    PrefillRequest,
    StepOutput,
    Welcome,
    decode_from_gateway,
    decode_from_worker,
)
from kvtransfer.request_parts import RequestOutput
from tests.fuzz.hostile import NAMES, QUICK, TREES, frame_of, spoilt, tree_of
from tests.kvtransfer.control_world import HELLO
from tests.kvtransfer.samples import FROM_GATEWAY, FROM_WORKER, spec

GATEWAYS = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
TIMING = LinkTiming(beat_interval=0.5, dead_after=2.0)
MAX_PENDING = 8


class FakeWire:
    """What `GatewayLinks` dials: keeps what is said, and hands in what the test has for it."""

    def __init__(self) -> None:
        self.said: list = []
        self.coming: list = []
        self.is_open = True

    def watch(self, mailbox) -> None: ...

    def poll(self, timeout) -> None: ...

    def close(self) -> None: ...

    def receive(self) -> list:
        coming, self.coming = self.coming, []
        return coming

    def send(self, gateway, message) -> bool:
        assert gateway in GATEWAYS
        assert decode_from_worker(encode(message)) == message, "the gateway could not read this"
        if self.is_open:
            self.said.append((gateway, message))
        return self.is_open


class LinksWorld:
    """The links of one worker whose engine never takes anything in, unless told."""

    def __init__(self) -> None:
        self.wire = FakeWire()
        self.inbox: Mailbox = Mailbox()
        self.links = GatewayLinks(
            HELLO, GATEWAYS, TIMING, self.inbox, MAX_PENDING, dial=lambda worker_id, gateways: self.wire
        )
        self.now = 100.0
        self.num_sent = dict.fromkeys(GATEWAYS, 0)
        self.turn()

    def turn(self) -> None:
        self.links.turn(self.now)

    def say(self, gateway: str, tree) -> None:
        self.wire.coming.append((gateway, decode_from_gateway.or_error([frame_of(tree)])))
        self.turn()

    def introduction(self, gateway: str) -> int:
        return self.links._links[gateway].introduction

    def welcome(self, gateway: str) -> None:
        self.num_sent[gateway] = 0
        self.say(gateway, tree_of(Welcome("e1", self.introduction(gateway))))

    def say_next(self, gateway: str, message) -> None:
        """A request or a cancellation with the number that is due."""
        self.num_sent[gateway] += 1
        self.say(gateway, tree_of(message) | {"sequence": self.num_sent[gateway]})

    def check(self) -> None:
        backlog = self.inbox.drain()
        for item in backlog:
            self.inbox.put(item)
        requests = [item for item in backlog if isinstance(item, FromGateway) and not isinstance(item.message, Cancel)]
        assert len(requests) <= MAX_PENDING
        assert len(backlog) <= 2 * (MAX_PENDING + MAX_PENDING_CANCELS)
        assert len(self.links._complaints._said) <= MAX_SENDERS
        self.check_numbers()

    def check_numbers(self) -> None:
        """What goes to a gateway counts 1, 2, ... since its last introduction."""
        expected = dict.fromkeys(GATEWAYS, 1)
        for gateway, message in self.wire.said:
            if isinstance(message, StepOutput):
                assert message.sequence == expected[gateway] or message.sequence == 1, message
                expected[gateway] = message.sequence + 1

    def close(self) -> None:
        self.inbox.close()
        self.links._outbox.close()


SAID = spoilt(st.sampled_from(FROM_GATEWAY)) | spoilt(st.sampled_from(FROM_WORKER)) | TREES
STEPS = st.one_of(
    st.tuples(st.just("say"), st.integers(0, 1), SAID),
    st.tuples(st.just("say"), st.integers(0, 1), SAID),
    st.tuples(st.just("welcome"), st.integers(0, 1), st.none()),
    st.tuples(st.just("welcome"), st.integers(0, 1), st.none()),
    st.tuples(st.just("request"), st.integers(0, 1), NAMES),
    st.tuples(st.just("request"), st.integers(0, 1), NAMES),
    st.tuples(st.just("cancel"), st.integers(0, 1), NAMES),
    st.tuples(st.just("output"), st.integers(0, 1), NAMES),
    st.tuples(st.just("shut"), st.integers(0, 1), st.none()),
    st.tuples(st.just("pass"), st.sampled_from([0, 1, 3]), st.none()),
    st.tuples(st.just("drain"), st.just(0), st.none()),
)


@QUICK
@given(steps=st.lists(STEPS, max_size=60))
def test_no_sequence_of_messages_breaks_a_workers_control_plane(steps):
    world = LinksWorld()
    try:
        for name, number, what in steps:
            play(world, name, number, what)
            world.check()
        recover(world)
    finally:
        world.close()


def play(world: LinksWorld, name: str, number: int, what) -> None:
    gateway = GATEWAYS[number % 2]
    match name:
        case "say":
            world.say(gateway, what)
        case "welcome":
            world.welcome(gateway)
        case "request":
            world.say_next(gateway, PrefillRequest(spec("r"), None))
        case "cancel":
            world.say_next(gateway, Cancel("r", 0))
        case "output":
            world.links.send(gateway, [RequestOutput("r", 0, 0, (1,))])
            world.turn()
        case "shut":
            world.wire.is_open = not world.wire.is_open
        case "pass":
            world.now += number
            world.turn()
        case "drain":
            world.inbox.drain()


def recover(world: LinksWorld) -> None:
    """Whatever has been said, a gateway that behaves from now on gets a worker that works."""
    world.wire.is_open = True
    world.inbox.drain()
    world.now += TIMING.dead_after + 1.0
    world.turn()
    for gateway in GATEWAYS:
        world.now += HELLO_INTERVAL_S
        world.welcome(gateway)
        world.say(gateway, tree_of(GatewayBeat("e1", 0)))
        world.say_next(gateway, PrefillRequest(spec("last"), None))
    taken = [item for item in world.inbox.drain() if isinstance(item, FromGateway)]
    assert [item.gateway for item in taken] == list(GATEWAYS)


def test_a_gateway_that_comes_and_goes_does_not_fill_the_inbox_of_an_engine_that_is_busy():
    """Each loss is news for the engine only if it was given something since the one before."""
    world = LinksWorld()
    try:
        for _ in range(500):
            world.welcome(GATEWAYS[0])
            world.say_next(GATEWAYS[0], PrefillRequest(spec("r"), None))
            world.say(GATEWAYS[0], tree_of(GatewayBeat("another", 0)))
        waiting = world.inbox.drain()
        assert sum(isinstance(item, FromGateway) for item in waiting) <= MAX_PENDING
        assert sum(isinstance(item, GatewayLost) for item in waiting) <= MAX_PENDING + 1
        assert isinstance(waiting[-1], GatewayLost)
    finally:
        world.close()
