"""A worker's control links and the gateways they lead to, all on real sockets."""

import asyncio
import functools
import time
from contextlib import asynccontextmanager

import msgspec

from kvtransfer.channel import ControlClient, ControlServer
from kvtransfer.control import GatewayLinks, LinkTiming
from kvtransfer.curve import CurveKeys
from kvtransfer.link_name import is_of
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import GatewayBeat, Heartbeat, Hello, Welcome
from kvtransfer.request_parts import RequestOutput
from kvtransfer.worker_facts import LeaveCause, Limits, Role
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

HELLO = Hello(1, Role.PREFILL, "prefill-0", "g1", FINGERPRINT, LAYOUT, Limits(10, 2, 64), None)
PATIENCE_S = 10.0
OUTPUT = RequestOutput("r", 0, 0, (5,))


class Gateway:
    """The other end: a real ControlServer and the words of a gateway."""

    def __init__(self, port: int = 0, security: CurveKeys | None = None) -> None:
        self.server = ControlServer("127.0.0.1", port, security)
        self.endpoint = self.server.endpoint
        self.worker = ""  # name of the connection that was heard last
        self.introduction = 0  # of the last Hello heard
        self.num_sent = 0  # numbered messages since Welcome

    async def hear(self, kind, seconds: float = PATIENCE_S):
        """The next message of a kind; others are passed over."""
        async with asyncio.timeout(seconds):
            while True:
                self.worker, message = await self.server.receive()
                assert is_of(self.worker, "prefill-0", "g1")
                if isinstance(message, Hello):
                    self.introduction = message.introduction
                if isinstance(message, kind):
                    return message

    async def hears_no(self, kind, seconds: float = 0.3) -> bool:
        try:
            await self.hear(kind, seconds)
        except TimeoutError:
            return True
        return False

    def say(self, message) -> None:
        assert self.server.send(self.worker, message)

    def say_next(self, message):
        """Says a request or a cancellation with the number it has to have, and returns that."""
        self.num_sent += 1
        numbered = msgspec.structs.replace(message, sequence=self.num_sent)
        self.say(numbered)
        return numbered

    def beat(self, epoch: str = "e1") -> None:
        self.say(GatewayBeat(epoch, self.num_sent))

    def say_welcome(self, epoch: str = "e1") -> None:
        """In answer to the last Hello heard."""
        self.num_sent = 0
        self.say(Welcome(epoch, self.introduction))

    async def welcome(self, epoch: str = "e1") -> None:
        message = await self.hear(Hello)
        while isinstance(message, Hello):
            self.say_welcome(epoch)
            message = await self.hear((Hello, Heartbeat))

    def close(self) -> None:
        self.server.close()


class World:
    """One worker's links and its gateways."""

    def __init__(
        self,
        endpoints,
        dead_after: float,
        beat_interval: float = 0.05,
        max_pending: int = 64,
        security: CurveKeys | None = None,
    ) -> None:
        self.inbox: Mailbox = Mailbox()
        timing = LinkTiming(beat_interval, dead_after)
        dial = functools.partial(ControlClient, security=security)
        self.links = GatewayLinks(HELLO, endpoints, timing, self.inbox, max_pending, dial)
        self.links.start()
        self.kept: list = []

    async def told(self, seconds: float = PATIENCE_S):
        """The next thing that the engine is told."""
        deadline = time.monotonic() + seconds
        while not self.kept:
            assert time.monotonic() < deadline, "the engine was told nothing"
            await asyncio.sleep(0.005)
            self.kept += self.inbox.drain()
        return self.kept.pop(0)

    def told_nothing_more(self) -> bool:
        self.kept += self.inbox.drain()
        return not self.kept


@asynccontextmanager
async def world(num_gateways: int = 1, dead_after: float = 30.0, **bounds):
    gateways = [Gateway() for _ in range(num_gateways)]
    made = World([gateway.endpoint for gateway in gateways], dead_after, **bounds)
    try:
        yield made, *gateways
    finally:
        made.links.leave("the test is over", LeaveCause.SHUTDOWN)
        assert not made.links.is_alive()
        made.inbox.close()
        for gateway in gateways:
            gateway.close()


def in_loop(scenario):
    """The test runs as the coroutine `scenario`, and not for ever."""

    @functools.wraps(scenario)
    def run(*args, **kwargs) -> None:
        asyncio.run(asyncio.wait_for(scenario(*args, **kwargs), 30))

    return run
