"""Two processes with one worker id, on real sockets: the second cannot take the first one's messages away."""

import asyncio
import functools
from contextlib import asynccontextmanager, suppress

import msgspec

from gateway.cluster import Cluster, ClusterSettings
from gateway.dispatch import Dispatcher, DispatchSettings
from kvtransfer.channel import ControlServer
from kvtransfer.control import AllGatewaysRefused, FromGateway, GatewayLinks, GatewayLost, LinkTiming
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import PrefillRequest
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.worker_facts import LeaveCause
from tests.gateway.cluster_world import EPOCH, FINGERPRINT, Client, hello, sampling

PATIENCE_S = 5.0


def in_loop(test):
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    return run


class Process:
    """A worker process as far as its gateway sees it."""

    def __init__(self, gateway: str, introduction) -> None:
        self.inbox: Mailbox = Mailbox()
        self.gateway = gateway
        self.told: list = []
        self.links = GatewayLinks(introduction, [gateway], LinkTiming(0.05, 60.0), self.inbox, 64)
        self.links.start()

    async def hear(self, kind: type):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.told += self.inbox.drain()
                for event in self.told:
                    if isinstance(event, kind):
                        self.told.remove(event)
                        return event
                await asyncio.sleep(0.005)

    def stop(self) -> None:
        self.links.leave("the test is over", LeaveCause.SHUTDOWN)
        self.inbox.close()


class Front:
    """A dispatcher on a real socket."""

    def __init__(self, server: ControlServer) -> None:
        self.endpoint = server.endpoint
        self.cluster = Cluster(EPOCH, ClusterSettings(dead_after_s=60.0, beat_interval_s=0.05))
        self.dispatcher = Dispatcher(self.cluster, DispatchSettings(tick_s=0.02))
        self.processes: list[Process] = []

    async def start(self, introduction) -> Process:
        self.processes.append(Process(self.endpoint, introduction))
        return self.processes[-1]

    async def live(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while {f"{worker.worker_id}/{worker.generation}" for worker in self.dispatcher.workers} != set(names):
                await asyncio.sleep(0.005)

    async def serves_on(self, process: Process) -> None:
        """A request of one token goes to `process` and comes back from it."""
        client = Client(self.dispatcher, (1, 2, 3), sampling(max_tokens=1), arrived_at=0.0)
        message = (await process.hear(FromGateway)).message
        assert isinstance(message, PrefillRequest)
        end = RequestEnd(EndReason.LENGTH)
        process.links.send(self.endpoint, [RequestOutput(message.request.request_id, 0, 0, (7,), end)])
        async with asyncio.timeout(PATIENCE_S):
            await client.task
        assert (client.tokens, client.error) == ([7], None)


@asynccontextmanager
async def front():
    server = ControlServer("127.0.0.1", 0)
    made = Front(server)
    running = asyncio.create_task(made.dispatcher.run(server))
    try:
        yield made
    finally:
        for process in made.processes:
            process.stop()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        server.close()


@in_loop
async def test_a_second_process_that_is_refused_does_not_disturb_the_first():
    async with front() as it:
        await it.start(hello("decode-0"))
        first = await it.start(hello("prefill-0", "g1"))
        await it.live("decode-0/g1", "prefill-0/g1")
        other_model = msgspec.structs.replace(FINGERPRINT, weights="w9")
        second = await it.start(hello("prefill-0", "g2", fingerprint=other_model))
        await second.hear(AllGatewaysRefused)
        for _ in range(3):
            await it.serves_on(first)
        await it.live("decode-0/g1", "prefill-0/g1")
        assert first.told == second.told == []


@in_loop
async def test_a_restarted_worker_replaces_the_start_before_which_is_told_so():
    async with front() as it:
        await it.start(hello("decode-0"))
        first = await it.start(hello("prefill-0", "g1"))
        await it.live("decode-0/g1", "prefill-0/g1")
        second = await it.start(hello("prefill-0", "g2"))
        await first.hear(GatewayLost)
        await first.hear(AllGatewaysRefused)
        await it.live("decode-0/g1", "prefill-0/g2")
        for _ in range(3):
            await it.serves_on(second)
        assert first.told == second.told == []
