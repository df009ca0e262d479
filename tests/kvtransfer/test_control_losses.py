"""A worker's control links when messages are lost, a gateway refuses, or the engine does not keep up."""

import asyncio
import logging
from contextlib import asynccontextmanager

import msgspec

from kvtransfer import control as control_module
from kvtransfer import gateway_link as link_module
from kvtransfer.control import AllGatewaysRefused, FromGateway, GatewayLinks, GatewayLost, LinkTiming
from kvtransfer.errors import MessageError
from kvtransfer.line_budget import NUM_LINES, PERIOD_S
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Cancel, GatewayBeat, Heartbeat, Hello, PrefillRequest, Refused, StepOutput, Welcome
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.sockets import endpoint_port
from kvtransfer.worker_facts import LeaveCause
from tests.kvtransfer.control_world import HELLO, OUTPUT, Gateway, World, in_loop, world
from tests.kvtransfer.cut_proxy import Direction, cut_proxy
from tests.kvtransfer.samples import spec

AGAIN = msgspec.structs.replace(HELLO, introduction=2)


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- numbers


@in_loop
async def test_a_missing_request_loses_the_gateway_and_what_comes_behind_it_is_not_taken():
    async with world() as (worker, gateway):
        await gateway.welcome()
        first = gateway.say_next(Cancel("a", 0))
        gateway.num_sent += 1
        for name in ("c", "d"):
            gateway.say_next(Cancel(name, 0))
        assert await worker.told() == FromGateway(gateway.endpoint, first)
        assert await worker.told() == GatewayLost(gateway.endpoint)
        assert await gateway.hear(Hello) == AGAIN
        gateway.say_welcome()
        last = gateway.say_next(Cancel("e", 0))
        assert last.sequence == 1
        assert await worker.told() == FromGateway(gateway.endpoint, last)


@in_loop
async def test_a_missing_last_request_is_seen_by_the_beat():
    async with world() as (worker, gateway):
        await gateway.welcome()
        gateway.say_next(Cancel("a", 0))
        gateway.beat()
        assert await worker.told() == FromGateway(gateway.endpoint, Cancel("a", 0, 1))
        gateway.num_sent += 1
        gateway.beat()
        assert await worker.told() == GatewayLost(gateway.endpoint)
        assert await gateway.hear(Hello) == AGAIN


@in_loop
async def test_words_that_cross_a_new_hello_are_of_the_time_before():
    async with world() as (worker, gateway):
        await gateway.welcome("e1")
        gateway.num_sent = 1
        gateway.beat("e1")
        assert await worker.told() == GatewayLost(gateway.endpoint)
        for _ in range(2):
            gateway.say_welcome("e1")  # for the first Hello: nothing newer was heard
            gateway.say_next(Cancel("late", 0))
            gateway.beat("e1")
        await gateway.welcome("e1")
        assert worker.told_nothing_more()
        gateway.beat("e1")
        cancel = gateway.say_next(Cancel("new", 0))
        assert await worker.told() == FromGateway(gateway.endpoint, cancel)


@in_loop
async def test_heartbeats_name_the_last_output_and_a_new_welcome_begins_anew():
    async with world() as (worker, gateway):
        await gateway.welcome()
        for _ in range(3):
            worker.links.send(gateway.endpoint, [OUTPUT])
            await gateway.hear(StepOutput)
        assert (await gateway.hear(Heartbeat)).sequence == 3
        gateway.say_next(Cancel("a", 0))
        gateway.num_sent += 1
        gateway.beat()
        await gateway.hear(Hello)
        worker.links.send(gateway.endpoint, [OUTPUT])  # between Hello and Welcome: it is about what was cancelled
        await asyncio.sleep(0.1)
        gateway.say_welcome()
        assert (await gateway.hear((Heartbeat, StepOutput))).sequence == 0
        worker.links.send(gateway.endpoint, [OUTPUT])
        assert await gateway.hear(StepOutput) == StepOutput("g1", 1, (OUTPUT,))


@asynccontextmanager
async def behind_a_proxy():
    gateway = Gateway()
    async with cut_proxy(endpoint_port(gateway.endpoint)) as proxy:
        worker = World([proxy.endpoint], dead_after=30.0)
        try:
            await gateway.welcome()
            yield worker, gateway, proxy
        finally:
            worker.links.leave("the test is over", LeaveCause.SHUTDOWN)
            worker.inbox.close()
            gateway.close()


@in_loop
async def test_an_output_lost_with_the_line_shows_in_the_next_heartbeat():
    async with behind_a_proxy() as (worker, gateway, proxy):
        proxy.swallow(Direction.FROM_WORKER)
        worker.links.send(proxy.endpoint, [RequestOutput("swallowed", 0, 0, (5,))])
        await proxy.cut_behind("swallowed")
        async with asyncio.timeout(5):
            while (message := await gateway.hear((Heartbeat, StepOutput))).sequence == 0:
                assert isinstance(message, Heartbeat)  # said before the line was cut
        assert (type(message), message.sequence) == (Heartbeat, 1)
        assert worker.told_nothing_more()


@in_loop
async def test_a_cancel_lost_with_the_line_costs_the_gateway_its_requests():
    async with behind_a_proxy() as (worker, gateway, proxy):
        request = gateway.say_next(PrefillRequest(spec("r"), None))
        assert await worker.told() == FromGateway(proxy.endpoint, request)
        proxy.swallow(Direction.FROM_GATEWAY)
        gateway.say_next(Cancel("swallowed", 0))
        await proxy.cut_behind("swallowed")
        assert worker.told_nothing_more()
        async with asyncio.timeout(5):
            while worker.told_nothing_more():
                gateway.server.send(gateway.worker, GatewayBeat("e1", gateway.num_sent))  # False until it is back
                await asyncio.sleep(0.02)
        assert await worker.told() == GatewayLost(proxy.endpoint)
        await gateway.welcome()


# --- refusals


@in_loop
async def test_when_all_gateways_refuse_the_engine_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(link_module, "REFUSED_INTERVAL_S", 0.05)
    async with world(2) as (worker, one, other):
        for gateway in (one, other):
            assert worker.told_nothing_more()
            for _ in range(3):
                await gateway.hear(Hello)
                gateway.say(Refused("model weights: a != b"))
        assert await worker.told() == AllGatewaysRefused()
        await asyncio.sleep(0.2)
        assert worker.told_nothing_more()
        said = [f"gateway {gateway.endpoint} refuses this worker: model weights: a != b" for gateway in (one, other)]
        assert warnings(caplog) == said


@in_loop
async def test_one_gateways_refusal_costs_the_other_nothing(monkeypatch):
    monkeypatch.setattr(link_module, "REFUSED_INTERVAL_S", 0.3)
    async with world(2) as (worker, one, other):
        await other.welcome()
        await one.hear(Hello)
        one.say(Refused("differs"))
        cancel = other.say_next(Cancel("r", 0))
        assert await worker.told() == FromGateway(other.endpoint, cancel)
        while not await one.hears_no(Hello, 0.25):
            pass  # said before the refusal came through
        await one.welcome()  # asked again, and by now it fits
        worker.links.send(one.endpoint, [OUTPUT])
        assert await one.hear(StepOutput) == StepOutput("g1", 1, (OUTPUT,))
        assert worker.told_nothing_more()


@in_loop
async def test_a_gateway_that_is_down_has_not_refused(monkeypatch):
    monkeypatch.setattr(link_module, "REFUSED_INTERVAL_S", 0.05)
    async with world(2) as (worker, one, other):
        other.close()
        for _ in range(4):
            await one.hear(Hello)
            one.say(Refused("differs"))
        assert worker.told_nothing_more()


@in_loop
async def test_a_refusal_of_a_worker_that_was_welcome_loses_the_gateway():
    async with world() as (worker, gateway):
        await gateway.welcome()
        gateway.say(Refused("malformed message"))
        assert await worker.told() == GatewayLost(gateway.endpoint)
        assert await worker.told() == AllGatewaysRefused()


@in_loop
async def test_noise_is_one_line_in_the_log(caplog):
    async with world() as (worker, gateway):
        await gateway.welcome()
        for _ in range(20):
            await gateway.server._socket.send_multipart([gateway.worker.encode(), b"\xc1"])
        cancel = gateway.say_next(Cancel("r", 0))
        assert await worker.told() == FromGateway(gateway.endpoint, cancel)
        assert len(warnings(caplog)) == 1


class OneGateway:
    """In place of sockets: what the only gateway says next."""

    def __init__(self) -> None:
        self.says: list = []
        self.heard: list = []

    def receive(self) -> list:
        said, self.says = self.says, []
        return [("gateway", message) for message in said]

    def send(self, gateway, message) -> bool:
        self.heard.append(message)
        return True


def test_a_gateway_that_comes_and_goes_or_changes_its_mind_has_a_ceiling_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger=control_module.__name__)
    wire, num_rounds, now = OneGateway(), 400, 0.0
    links = GatewayLinks(HELLO, ["gateway"], LinkTiming(0.05, 30.0), Mailbox(), 64, dial=lambda *_: wire)
    for number in range(num_rounds):
        introduction = number + 1
        wire.says = [MessageError("bad"), Welcome("e", introduction), GatewayBeat("f", 0), Refused(f"{number} " * 400)]
        now += 0.1
        links.turn(now)
    links.turn(now + PERIOD_S)
    lines = [record.getMessage() for record in caplog.records]
    num_periods = num_rounds * 0.1 / PERIOD_S
    assert len(lines) == num_periods * (NUM_LINES + 1)
    assert max(map(len, lines)) < 500
    told = [int(line.split(": ")[1].split()[0]) for line in lines if "more lines about it" in line]
    assert len(lines) - len(told) + sum(told) >= 3 * num_rounds, "nothing is hidden"


def test_a_gateway_that_seldom_comes_and_goes_is_told_in_full(caplog):
    caplog.set_level(logging.INFO, logger=control_module.__name__)
    wire, now = OneGateway(), 0.0
    links = GatewayLinks(HELLO, ["gateway"], LinkTiming(0.05, 30.0), Mailbox(), 64, dial=lambda *_: wire)
    for introduction in range(1, 50):
        wire.says = [Welcome("e", introduction), GatewayBeat("f", 0)]
        now += PERIOD_S / 4
        links.turn(now)
    assert [record.getMessage() for record in caplog.records] == 49 * [
        "gateway gateway has registered this worker",
        "gateway gateway was restarted: cancelling its requests",
    ]


# --- an engine that does not keep up


@in_loop
async def test_requests_beyond_the_inbox_are_turned_away_and_cancels_are_not():
    async with world(max_pending=2) as (worker, gateway):
        await gateway.welcome()
        messages = [
            gateway.say_next(message)
            for message in (*(PrefillRequest(spec(name), None) for name in "abc"), Cancel("a", 0))
        ]
        end = RequestEnd(EndReason.OVERLOADED, "the worker's inbox is full")
        assert await gateway.hear(StepOutput) == StepOutput("g1", 1, (RequestOutput("c", 0, 0, end=end),))
        taken = [await worker.told() for _ in range(3)]
        assert [event.message for event in taken] == [messages[0], messages[1], messages[3]]
        request = gateway.say_next(PrefillRequest(spec("d"), None))
        assert await worker.told() == FromGateway(gateway.endpoint, request)


@in_loop
async def test_cancels_are_bounded_too(monkeypatch):
    monkeypatch.setattr(control_module, "MAX_PENDING_CANCELS", 3)
    async with world(max_pending=2) as (worker, gateway):
        await gateway.welcome()
        for number in range(8):
            gateway.say_next(Cancel(str(number), 0))
        assert await gateway.hear(Hello) == AGAIN
        told = [await worker.told() for _ in range(6)]
        assert [event.message.request_id for event in told[:5]] == list("01234")
        assert told[5] == GatewayLost(gateway.endpoint)
        assert worker.told_nothing_more()
