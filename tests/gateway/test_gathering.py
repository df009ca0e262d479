"""Choices of one prompt on the gateway: told to the workers once, and each a request of its own from there on."""

import asyncio

import pytest

from gateway.backend import OverloadedError, UnavailableError
from gateway.dispatch import DispatchSettings
from gateway.gathering import Gathering
from gateway.modes import Mode
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest
from kvtransfer.request_parts import EndReason
from kvtransfer.worker_facts import Limits
from tests.gateway.cluster_world import beat, hello, world
from tests.gateway.test_dispatch import in_loop

BOTH = ("prefill-0", "decode-0")


async def started(it, num_choices: int, **how):
    """The clients, and the specs that prefill was given last, leader first."""
    clients = it.begin(num_choices, **how)
    await it.settle()
    return clients, list(it.control.to("prefill-0", PrefillRequest)[-1].specs)


@in_loop
async def test_workers_hear_of_all_choices_at_once():
    async with world(*BOTH) as it:
        _, specs = await started(it, 4)
        [to_prefill], [to_decode] = it.control.to("prefill-0", PrefillRequest), it.control.to("decode-0", DecodeRequest)
        assert to_prefill.siblings == to_decode.siblings
        assert to_prefill.request == to_decode.request
        assert len({spec.request_id for spec in specs}) == 4
        assert [spec.sampling.choice_index for spec in specs] == [0, 1, 2, 3]
        assert it.dispatcher.in_flight == 4
        book = it.dispatcher._flights.book
        assert (book.num_tokens("prefill-0"), book.num_tokens("decode-0")) == (3, 3 + 4 * 8)
        assert book.num_requests("decode-0") == 4
        it.dispatcher.check_integrity()


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.LOCAL])
@in_loop
async def test_each_choice_has_its_own_tokens_and_its_own_end(mode):
    async with world(*BOTH) as it:
        clients = it.begin(3, mode=mode)
        await it.settle()
        specs = it.control.to("decode-0", DecodeRequest)[-1].specs
        for index, spec in enumerate(specs):
            await it.reserve(spec)
            if mode is Mode.DISAGGREGATED:
                await it.say("prefill-0", spec, 0, [10 + index], EndReason.STOP if index == 0 else None)
            else:
                await it.say("decode-0", spec, 0, [10 + index], EndReason.STOP if index == 0 else None)
        assert [client.finish for client in clients] == [EndReason.STOP, None, None]
        cancelled = [cancel.request_id for cancel in it.control.to("decode-0", Cancel)]
        assert cancelled == ([specs[0].request_id] if mode is Mode.DISAGGREGATED else [])
        for index, spec in list(enumerate(specs))[1:]:
            await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER)
            await it.say("decode-0", spec, 1, [20 + index], EndReason.LENGTH)
        assert [client.tokens for client in clients] == [[10], [11, 21], [12, 22]]
        assert [client.mode for client in clients] == [mode] * 3
        it.assert_empty()


@in_loop
async def test_a_choice_that_is_left_is_cancelled_alone():
    async with world(*BOTH) as it:
        clients, specs = await started(it, 3)
        await clients[0].leave()
        assert [cancel.request_id for cancel in it.control.to("prefill-0", Cancel)] == [specs[0].request_id]
        assert it.dispatcher.in_flight == 2
        for client in clients[1:]:
            await client.leave()
        it.assert_empty()


@in_loop
async def test_after_a_loss_each_choice_goes_on_by_itself():
    async with world(*BOTH, "decode-1") as it:
        clients, specs = await started(it, 3)
        for index, spec in enumerate(specs):
            await it.reserve(spec)
            await it.say("prefill-0", spec, 0, [10 + index])
        await it.say("decode-0", specs[1], 1, [21])
        it.dispatcher._drop("decode-0", "it is gone")
        it.dispatcher._placement.place_waiting()
        again = it.control.to("decode-1", DecodeRequest)
        assert [message.siblings for message in again] == [()] * 3
        assert [message.request.output_token_ids for message in again] == [(10,), (11, 21), (12,)]
        assert [message.request.sampling.choice_index for message in again] == [0, 1, 2]
        assert len(it.recorder.retries) == 3
        for client in clients:
            await client.leave()
        it.assert_empty()


@in_loop
async def test_more_than_may_run_at_once_go_in_parts():
    async with world() as it:
        await it.hear("prefill-0", hello("prefill-0"))
        await it.hear("decode-0", hello("decode-0", limits=Limits(1000, 3, 2000)))
        for worker_id in BOTH:
            await it.hear(worker_id, beat())
        clients = it.begin(7)
        await it.settle()
        for worker_id, kind in (("prefill-0", PrefillRequest), ("decode-0", DecodeRequest)):
            parts = [message.specs for message in it.control.to(worker_id, kind)]
            assert [[spec.sampling.choice_index for spec in part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]
        for client in clients:
            await client.leave()
        it.assert_empty()


@in_loop
async def test_choices_count_one_by_one_and_are_turned_away_together():
    async with world(*BOTH, settings=DispatchSettings(tick_s=3600, max_in_flight=5)) as it:
        clients = it.begin(3)
        late = it.begin(3)
        await it.settle()
        assert it.dispatcher.in_flight == 3
        assert [type(client.error) for client in late] == [OverloadedError] * 3
        assert len(it.control.to("prefill-0", PrefillRequest)) == 1
        fitting = it.begin(2)
        await it.settle()
        assert it.dispatcher.in_flight == 5
        for client in (*clients, *fitting):
            await client.leave()
        it.assert_empty()


@in_loop
async def test_nobody_to_serve_them_is_an_error_for_each():
    async with world("prefill-0") as it:
        clients = it.begin(3)
        await it.settle()
        assert [type(client.error) for client in clients] == [UnavailableError] * 3
        it.assert_empty()


@in_loop
async def test_an_unreachable_worker_costs_no_choice():
    async with world(*BOTH, "decode-1") as it:
        it.control.unreachable.add("decode-0")
        clients, specs = await started(it, 3)
        [to_decode] = it.control.to("decode-1", DecodeRequest)
        assert list(to_decode.specs) == specs
        assert {spec.attempt for spec in specs} == {1}
        told_off = {(cancel.request_id, cancel.attempt) for cancel in it.control.to("prefill-0", Cancel)}
        assert told_off == {(spec.request_id, 0) for spec in specs}
        it.dispatcher.check_integrity()
        for client in clients:
            await client.leave()
        it.assert_empty()


@in_loop
async def test_one_that_waits_and_leaves_holds_up_nobody():
    launched = []
    gathering = Gathering(3)
    first = asyncio.ensure_future(gathering.join("a", launched.extend))
    second = asyncio.ensure_future(gathering.join("b", launched.extend))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert launched == []
    await gathering.join("c", launched.extend)
    await second
    assert launched == ["b", "c"]
    assert first.cancelled()


@in_loop
async def test_what_fails_for_one_fails_for_all():
    gathering = Gathering(2)
    waiting = asyncio.ensure_future(gathering.join("a", lambda flights: None))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError), gathering.one_fate():
        raise UnavailableError("nobody")
    with pytest.raises(UnavailableError):
        await waiting
