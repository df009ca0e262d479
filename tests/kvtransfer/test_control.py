"""A worker's control links against real sockets: who is told what, in which order, and what a lost gateway means."""

import asyncio
import time

import msgspec
import pytest

from kvtransfer.addresses import endpoint
from kvtransfer.control import FromGateway, GatewayLinks, GatewayLost, LinkTiming, Report
from kvtransfer.errors import SettingsError
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    Goodbye,
    Heartbeat,
    Hello,
    PrefillRequest,
    PrefillSource,
    Reintroduce,
    StepOutput,
)
from kvtransfer.request_parts import RequestOutput
from kvtransfer.sockets import endpoint_port
from kvtransfer.worker_facts import LeaveCause, Load
from tests.kvtransfer.control_world import HELLO, OUTPUT, PATIENCE_S, Gateway, World, in_loop, world
from tests.kvtransfer.samples import TARGET, spec


@in_loop
async def test_hello_is_repeated_until_welcome_and_then_heartbeats_follow():
    async with world() as (worker, gateway):
        for _ in range(2):
            assert await gateway.hear(Hello) == HELLO
        gateway.say_welcome("e1")
        await gateway.hear(Heartbeat)
        assert await gateway.hears_no(Hello, seconds=0.5)
        assert worker.told_nothing_more()


@in_loop
async def test_a_worker_that_starts_before_its_gateway_registers_when_that_comes():
    probe = Gateway()
    probe.close()
    worker = World([probe.endpoint], dead_after=30.0)
    await asyncio.sleep(0.2)
    gateway = Gateway(endpoint_port(probe.endpoint))
    await gateway.welcome()
    worker.links.leave("over", LeaveCause.SHUTDOWN)
    worker.inbox.close()
    gateway.close()


@in_loop
async def test_heartbeats_carry_what_the_engine_last_reported():
    async with world() as (worker, gateway):
        await gateway.welcome()
        worker.links.report(Report(41, Load(1, 0, 0.5)))
        worker.links.report(Report(42, Load(3, 2, 0.25, 6, 8), draining=True))
        while (beat := await gateway.hear(Heartbeat)).progress != 42:
            assert beat.progress in (0, 41)
        assert beat == Heartbeat("g1", 0, 42, Load(3, 2, 0.25, 6, 8), draining=True)


@in_loop
async def test_beats_come_at_their_rate():
    async with world(beat_interval=0.1) as (_, gateway):
        await gateway.welcome()
        before = time.monotonic()
        for _ in range(5):
            await gateway.hear(Heartbeat)
        assert 0.3 < time.monotonic() - before < 2.0


@in_loop
async def test_requests_reach_the_engine_in_order_with_their_gateway():
    async with world() as (worker, gateway):
        await gateway.welcome()
        messages = [
            PrefillRequest(spec("a"), TARGET),
            PrefillRequest(spec("b"), None),
            Cancel("a", 0),
            DecodeRequest(spec("c"), PrefillSource("prefill-1", "g")),
        ]
        numbered = [gateway.say_next(message) for message in messages]
        assert [message.sequence for message in numbered] == [1, 2, 3, 4]
        assert [await worker.told() for _ in messages] == [
            FromGateway(gateway.endpoint, message) for message in numbered
        ]


@in_loop
async def test_outputs_go_to_their_gateway_in_order():
    async with world(2) as (worker, one, other):
        await one.welcome()
        await other.welcome()
        for token in range(20):
            worker.links.send(one.endpoint, [RequestOutput("r", 0, token, (token,))])
        worker.links.send(other.endpoint, [OUTPUT, OUTPUT])
        for token in range(20):
            assert await one.hear(StepOutput) == StepOutput("g1", token + 1, (RequestOutput("r", 0, token, (token,)),))
        assert await other.hear(StepOutput) == StepOutput("g1", 1, (OUTPUT, OUTPUT))
        assert await other.hears_no(StepOutput)


@in_loop
async def test_a_gateway_that_does_not_know_us_is_lost_and_greeted_again():
    async with world() as (worker, gateway):
        await gateway.welcome()
        gateway.say(Reintroduce("e2"))
        assert await worker.told() == GatewayLost(gateway.endpoint)
        assert await gateway.hear(Hello, seconds=2.0) == msgspec.structs.replace(HELLO, introduction=2)
        gateway.say(Reintroduce("e2"))  # an answer to something sent before that Hello
        gateway.say_welcome("e2")
        await gateway.hear(Heartbeat)
        assert worker.told_nothing_more()


@in_loop
async def test_another_epoch_in_a_beat_means_a_restart():
    async with world() as (worker, gateway):
        await gateway.welcome("e1")
        gateway.beat("e1")
        gateway.beat("e2")
        assert await worker.told() == GatewayLost(gateway.endpoint)
        await gateway.welcome("e2")
        assert worker.told_nothing_more()


@in_loop
async def test_another_epoch_in_a_welcome_means_a_restart_and_the_same_one_nothing():
    async with world() as (worker, gateway):
        await gateway.welcome("e1")
        gateway.say_welcome("e1")
        gateway.say_welcome("e2")
        assert await worker.told() == GatewayLost(gateway.endpoint)
        await gateway.welcome("e2")
        cancel = gateway.say_next(Cancel("r", 0))
        assert await worker.told() == FromGateway(gateway.endpoint, cancel)


@in_loop
async def test_silence_means_that_the_gateway_is_gone():
    async with world(dead_after=0.3) as (worker, gateway):
        await gateway.welcome()
        for _ in range(8):
            gateway.beat("e1")
            await asyncio.sleep(0.1)
        assert worker.told_nothing_more()
        before = time.monotonic()
        assert await worker.told() == GatewayLost(gateway.endpoint)
        assert time.monotonic() - before < 2.0
        await gateway.welcome("e1")
        assert worker.told_nothing_more()


@in_loop
async def test_a_gateway_that_is_down_is_lost_with_the_first_output_for_it():
    async with world() as (worker, gateway):
        await gateway.welcome()
        gateway.close()
        await asyncio.sleep(0.1)
        worker.links.send(gateway.endpoint, [OUTPUT])
        assert await worker.told() == GatewayLost(gateway.endpoint)
        worker.links.send(gateway.endpoint, [OUTPUT])
        again = Gateway(endpoint_port(gateway.endpoint))
        await again.welcome("e2")
        worker.links.send(gateway.endpoint, [RequestOutput("new", 0, 0)])
        assert (await again.hear(StepOutput)).outputs == (RequestOutput("new", 0, 0),)
        assert worker.told_nothing_more()
        again.close()


@in_loop
async def test_the_loss_of_one_gateway_is_not_the_loss_of_another():
    async with world(2, dead_after=0.4) as (worker, one, other):
        await one.welcome("e1")
        await other.welcome("e9")
        deadline = time.monotonic() + PATIENCE_S
        while worker.told_nothing_more() and time.monotonic() < deadline:
            other.beat("e9")
            worker.kept += worker.inbox.wait(0.05)
            await asyncio.sleep(0)
        assert worker.kept == [GatewayLost(one.endpoint)]


@in_loop
async def test_noise_from_a_gateway_changes_nothing():
    async with world() as (worker, gateway):
        await gateway.welcome()
        await gateway.server._socket.send_multipart([gateway.worker.encode(), b"\xc1"])
        await gateway.server._socket.send_multipart([gateway.worker.encode(), b"\xc0", b"\xc0"])
        cancel = gateway.say_next(Cancel("r", 0))
        assert await worker.told() == FromGateway(gateway.endpoint, cancel)
        assert worker.links.is_alive()


@in_loop
async def test_leaving_says_goodbye_to_all_behind_the_last_output():
    async with world(2) as (worker, one, other):
        await one.welcome()
        await other.welcome()
        worker.links.send(one.endpoint, [OUTPUT])
        worker.links.leave("shutting down", LeaveCause.SHUTDOWN)
        assert not worker.links.is_alive()
        assert await one.hear(StepOutput) == StepOutput("g1", 1, (OUTPUT,))
        assert await one.hear(Goodbye) == Goodbye("g1", "shutting down", LeaveCause.SHUTDOWN)
        assert await other.hear(Goodbye) == Goodbye("g1", "shutting down", LeaveCause.SHUTDOWN)


@in_loop
async def test_leaving_does_not_wait_for_a_gateway_that_never_came():
    nowhere = Gateway()
    nowhere.close()
    worker = World([nowhere.endpoint, endpoint("127.0.0.1", 1)], dead_after=30.0)
    before = time.monotonic()
    worker.links.leave("over", LeaveCause.SHUTDOWN)
    assert time.monotonic() - before < 2.0
    assert not worker.links.is_alive()
    worker.inbox.close()


def test_a_gateway_address_that_cannot_be_dialled_is_said_at_once():
    with pytest.raises(SettingsError, match="tcp://HOST:PORT"):
        GatewayLinks(HELLO, ["nonsense"], LinkTiming(0.1, 1.0), Mailbox(), 64)
