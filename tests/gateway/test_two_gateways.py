"""Two gateways over the same workers, with real links between them: each has its requests to itself, and when one dies
or starts anew the other one's streams do not notice."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from gateway.cluster import Cluster, ClusterSettings
from gateway.dispatch import Dispatcher, DispatchSettings
from gateway.modes import Mode
from kvtransfer.channel import ControlServer
from kvtransfer.control import FromGateway, GatewayLinks, GatewayLost, LinkTiming
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.sockets import endpoint_port
from kvtransfer.worker_facts import LeaveCause
from tests.gateway.cluster_world import RESERVED, Client, hello, sampling
from tests.gateway.test_dispatch import in_loop

PATIENCE_S = 10.0
GATEWAY_DEAD_AFTER_S = 0.6


async def eventually(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


class SharedWorker:
    """Serves every request it hears of at once, up to the token before the last, and ends it when told to finish.

    Token i of a request is 10 * (its first prompt token) + i, so a token that goes to the wrong gateway is seen.
    """

    def __init__(self, worker_id: str, gateways: list[str]) -> None:
        self.inbox: Mailbox = Mailbox()
        self.running: dict[str, tuple[str, object]] = {}  # request id to gateway and spec
        self.lost: list[str] = []
        self.cancelled: list[str] = []
        self.links = GatewayLinks(hello(worker_id), gateways, LinkTiming(0.05, GATEWAY_DEAD_AFTER_S), self.inbox, 64)
        self.links.start()
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            for event in self.inbox.drain():
                self._on_event(event)
            await asyncio.sleep(0.005)

    def _on_event(self, event) -> None:
        match event:
            case GatewayLost(gateway):
                self.lost.append(gateway)
                self.running = {name: item for name, item in self.running.items() if item[0] != gateway}
            case FromGateway(_, Cancel() as cancel):
                self.cancelled.append(cancel.request_id)
                self.running.pop(cancel.request_id, None)
            case FromGateway(gateway, PrefillRequest(spec)):
                self.running[spec.request_id] = (gateway, spec)
                self._say(gateway, spec, 0, 1)
            case FromGateway(gateway, DecodeRequest(spec)):
                self.running[spec.request_id] = (gateway, spec)
                self._say(gateway, spec, 0, 0, events=RESERVED)
                self._say(gateway, spec, 1, spec.sampling.max_tokens - 1)

    def finish_all(self) -> None:
        for gateway, spec in self.running.values():
            last = spec.sampling.max_tokens
            self._say(gateway, spec, last - 1, last, end=RequestEnd(EndReason.LENGTH))
        self.running = {}

    def _say(self, gateway: str, spec, start: int, stop: int, **more) -> None:
        tokens = tuple(10 * spec.prompt_token_ids[0] + index for index in range(start, stop))
        self.links.send(gateway, [RequestOutput(spec.request_id, spec.attempt, start, tokens, **more)])

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.links.leave("the test is over", LeaveCause.SHUTDOWN)
        self.inbox.close()


class Gateway:
    """A dispatcher on a port of its own. Closing it without a word is its death."""

    def __init__(self, epoch: str, port: int = 0) -> None:
        self.server = ControlServer("127.0.0.1", port)
        self.cluster = Cluster(epoch, ClusterSettings(dead_after_s=60.0, beat_interval_s=0.05))
        self.dispatcher = Dispatcher(self.cluster, DispatchSettings(tick_s=0.02))
        self.running = asyncio.create_task(self.dispatcher.run(self.server))

    async def ready(self) -> None:
        await eventually(lambda: self.dispatcher.status(Mode.DISAGGREGATED).ready)

    def ask(self, number: int, max_tokens: int = 4) -> Client:
        return Client(self.dispatcher, (number,), sampling(max_tokens), arrived_at=time.monotonic())

    async def die(self) -> None:
        self.server.close()
        self.running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.running


@asynccontextmanager
async def two_gateways():
    async with AsyncExitStack() as stack:
        gateways = [Gateway("epoch-a"), Gateway("epoch-b")]
        for gateway in gateways:
            stack.push_async_callback(gateway.die)
        endpoints = [gateway.server.endpoint for gateway in gateways]
        prefill, decode = SharedWorker("prefill-0", endpoints), SharedWorker("decode-0", endpoints)
        stack.push_async_callback(prefill.stop)
        stack.push_async_callback(decode.stop)
        for gateway in gateways:
            await gateway.ready()
        yield *gateways, prefill, decode


def tokens(number: int, count: int) -> list[int]:
    return [10 * number + index for index in range(count)]


@in_loop
async def test_each_gateway_has_its_own_requests_on_the_same_workers():
    async with two_gateways() as (one, other, prefill, decode):
        clients = [gateway.ask(number) for number in range(1, 5) for gateway in (one, other)]
        numbers = [number for number in range(1, 5) for _ in range(2)]
        await eventually(lambda: all(len(client.tokens) == 3 for client in clients))
        assert len(decode.running) == len(clients)
        decode.finish_all()
        await eventually(lambda: all(client.finish is EndReason.LENGTH for client in clients))
        assert [client.tokens for client in clients] == [tokens(number, 4) for number in numbers]
        assert prefill.lost == decode.lost == []
        for gateway in (one, other):
            gateway.dispatcher.check_integrity()
            assert gateway.dispatcher.in_flight == 0


@in_loop
async def test_a_client_that_leaves_one_gateway_cancels_nothing_of_the_other():
    async with two_gateways() as (one, other, _, decode):
        leaving, staying = one.ask(1), other.ask(2)
        await eventually(lambda: len(leaving.tokens) == len(staying.tokens) == 3)
        await leaving.leave()
        await eventually(lambda: len(decode.cancelled) == 1)
        decode.finish_all()
        await eventually(lambda: staying.finish is EndReason.LENGTH)
        assert staying.tokens == tokens(2, 4)


@in_loop
async def test_a_gateway_that_dies_takes_its_own_requests_with_it_and_comes_back():
    async with two_gateways() as (one, other, _, decode):
        theirs, ours = one.ask(1), other.ask(2)
        await eventually(lambda: len(theirs.tokens) == len(ours.tokens) == 3)
        port = endpoint_port(one.server.endpoint)
        await one.die()
        await eventually(lambda: decode.lost == [one.server.endpoint])
        assert [spec.prompt_token_ids for _, spec in decode.running.values()] == [(2,)], "freed, and only that"
        again = Gateway("epoch-c", port)
        try:
            await again.ready()
            new = again.ask(3)
            await eventually(lambda: len(new.tokens) == 3)
            decode.finish_all()
            await eventually(lambda: new.finish is ours.finish is EndReason.LENGTH)
            assert (ours.tokens, new.tokens) == (tokens(2, 4), tokens(3, 4))
        finally:
            await again.die()
