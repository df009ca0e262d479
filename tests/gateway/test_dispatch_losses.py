"""Messages that are lost between a real dispatcher and real worker links: noticed at once, and healed; requests go on.

The line to the prefill worker leads through a proxy that swallows a message and then cuts; libzmq connects again, and
neither side's socket has seen an error. Nobody is ever silent for long enough to be given up for it.
"""

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.cluster import Cluster, ClusterSettings
from gateway.dispatch import Dispatcher, DispatchSettings
from kvtransfer.channel import ControlServer
from kvtransfer.control import FromGateway, GatewayLinks, GatewayLost, LinkTiming
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest
from kvtransfer.request_parts import RequestOutput
from kvtransfer.sockets import endpoint_port
from kvtransfer.worker_facts import LeaveCause
from tests.gateway.cluster_world import EPOCH, RESERVED, Client, hello, sampling
from tests.kvtransfer.cut_proxy import Direction, cut_proxy

PATIENCE_S = 5.0


class LinkedWorker:
    """A worker without an engine: the test reads what it is told, and speaks for it."""

    def __init__(self, worker_id: str, gateway: str) -> None:
        self.inbox: Mailbox = Mailbox()
        self.told: list = []
        self.gateway = gateway
        self.links = GatewayLinks(hello(worker_id), [gateway], LinkTiming(0.05, 60.0), self.inbox, 64)
        self.links.start()

    async def hear(self, kind: type):
        """The next message of a kind, or GatewayLost; others are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.told += self.inbox.drain()
                while self.told:
                    event = self.told.pop(0)
                    message = event.message if isinstance(event, FromGateway) else event
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.005)

    def say(self, spec, *token_ids: int) -> None:
        self.links.send(self.gateway, [RequestOutput(spec.request_id, spec.attempt, 0, token_ids)])

    def reserve(self, spec) -> None:
        self.links.send(self.gateway, [RequestOutput(spec.request_id, spec.attempt, 0, events=RESERVED)])

    def stop(self) -> None:
        self.links.leave("the test is over", LeaveCause.SHUTDOWN)
        self.inbox.close()


class Lossy:
    """A dispatcher, and one worker of each role, prefill behind a proxy."""

    def __init__(self, server: ControlServer, proxy) -> None:
        self.proxy = proxy
        self.cluster = Cluster(EPOCH, ClusterSettings(dead_after_s=60.0, beat_interval_s=0.05))
        self.dispatcher = Dispatcher(self.cluster, DispatchSettings(tick_s=0.02))
        self.running = asyncio.create_task(self.dispatcher.run(server))
        self.prefill = LinkedWorker("prefill-0", proxy.endpoint)
        self.decode = LinkedWorker("decode-0", server.endpoint)

    async def ready(self, introduction: int) -> None:
        """Both workers are in, the prefill worker by its introduction of that number."""
        async with asyncio.timeout(PATIENCE_S):
            while {worker.worker_id: worker.hello.introduction for worker in self.cluster.workers} != {
                "prefill-0": introduction,
                "decode-0": 1,
            }:
                await asyncio.sleep(0.01)

    def ask(self) -> Client:
        return Client(self.dispatcher, (1, 2, 3), sampling(max_tokens=4), arrived_at=time.monotonic())

    async def serves_a_request(self, introduction: int) -> None:
        await self.ready(introduction)
        client = self.ask()
        spec = (await self.prefill.hear(PrefillRequest)).request
        while (await self.decode.hear(DecodeRequest)).request != spec:
            pass  # that of an earlier one
        await self.gives_a_token(client, spec)
        await client.leave()
        for worker in (self.prefill, self.decode):
            while (await worker.hear(Cancel)).request_id != spec.request_id:
                pass

    async def gives_a_token(self, client: Client, spec) -> None:
        self.decode.reserve(spec)
        self.prefill.say(spec, 7)
        async with asyncio.timeout(PATIENCE_S):
            while client.tokens != [7]:
                assert client.error is None
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running


@asynccontextmanager
async def lossy(num_introductions: int):
    """Serves before and after; in between the prefill worker may have to introduce itself again."""
    server = ControlServer("127.0.0.1", 0)
    async with cut_proxy(endpoint_port(server.endpoint)) as proxy:
        it = Lossy(server, proxy)
        try:
            await it.serves_a_request(introduction=1)
            yield it
            await it.serves_a_request(introduction=num_introductions)
            it.dispatcher.check_integrity()
            assert it.dispatcher.in_flight == 0
        finally:
            await it.stop()
            server.close()


async def an_output(it: Lossy) -> None:
    client = it.ask()
    spec = (await it.prefill.hear(PrefillRequest)).request
    it.proxy.swallow(Direction.FROM_WORKER)
    it.prefill.say(spec, 7)
    await it.proxy.cut_behind(spec.request_id)
    await goes_on(it, client, spec)


async def a_request(it: Lossy) -> None:
    it.proxy.swallow(Direction.FROM_GATEWAY)
    client = it.ask()
    spec = (await it.decode.hear(DecodeRequest)).request
    await it.proxy.cut_behind(spec.request_id)
    await goes_on(it, client, spec)


async def a_cancel(it: Lossy) -> None:
    client = it.ask()
    spec = (await it.prefill.hear(PrefillRequest)).request
    it.proxy.swallow(Direction.FROM_GATEWAY)
    await client.leave()
    await it.proxy.cut_behind(spec.request_id)
    await it.prefill.hear(GatewayLost)


async def goes_on(it: Lossy, client: Client, lost) -> None:
    """The prefill worker introduces itself again and gets the request again; the client notices nothing."""
    await it.prefill.hear(GatewayLost)
    while (spec := (await it.prefill.hear(PrefillRequest)).request).attempt == 0:
        pass
    assert (spec.request_id, spec.attempt) == (lost.request_id, 1)
    await it.gives_a_token(client, spec)
    await client.leave()


@pytest.mark.parametrize("lose", [an_output, a_request, a_cancel])
def test_a_message_lost_with_the_line_is_noticed_at_once_and_both_sides_begin_anew(lose):
    async def scenario() -> None:
        async with lossy(num_introductions=2) as it:
            await lose(it)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_cut_that_loses_nothing_costs_nothing():
    """The control: it is the loss that is noticed, not the cut."""

    async def scenario() -> None:
        async with lossy(num_introductions=1) as it:
            client = it.ask()
            spec = (await it.prefill.hear(PrefillRequest)).request
            assert (await it.decode.hear(DecodeRequest)).request == spec
            it.decode.reserve(spec)
            await it.proxy.cut_behind("")
            await asyncio.sleep(0.5)
            it.prefill.say(spec, 7)
            await asyncio.sleep(0.2)
            assert (client.tokens, client.error) == ([7], None)
            await client.leave()

    asyncio.run(asyncio.wait_for(scenario(), 30))
