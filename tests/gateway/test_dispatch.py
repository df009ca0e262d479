"""One request's life on the gateway: each rule on its own. Any order of events: test_dispatch_orders.py."""

import asyncio
import functools
import gc

import msgspec
import pytest

from gateway.backend import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    Traits,
    UnavailableError,
)
from gateway.cluster import ClusterSettings
from gateway.dispatch import DispatchSettings
from gateway.failover import FailoverSettings
from gateway.merge import InconsistentOutputError
from gateway.modes import Mode
from gateway.observer import KvHandover, Phases
from kvtransfer.codec import PROTOCOL_VERSION, encode
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    DecodeTarget,
    GatewayBeat,
    Goodbye,
    PrefillRequest,
    PrefillSource,
    Refused,
    Reintroduce,
    decode_from_gateway,
)
from kvtransfer.request_parts import EndReason, LifetimeEvent, RequestOutput
from tests.gateway.cluster_world import EPOCH, LIMITS, Client, World, beat, hello, link, sampling, step, world
from tests.gateway.test_phases import DECODE_READINGS, PREFILL_READINGS

BOTH = ("prefill-0", "decode-0")
LIVE = {"prefill-0": "g1", "decode-0": "g1"}
ONE_TRY = DispatchSettings(tick_s=3600, failover=FailoverSettings(max_retries=0))
"""What becomes of further attempts: test_failover.py."""


def in_loop(test):
    """Runs a coroutine test on an event loop of its own, with a time limit."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


def cancels(it, worker_id) -> int:
    return len(it.control.to(worker_id, Cancel))


async def started(it, has_room=True, **params):
    """A request that both workers have, and for which decode has room; returns the client and the spec."""
    client = await it.ask(**params)
    spec = it.spec("prefill-0", PrefillRequest)
    if has_room and spec.sampling.max_tokens > 1 and "decode-0" not in it.control.unreachable:
        await it.reserve(spec, generation=it.said["decode-0"][0])
    return client, spec


# --- the good life -----------------------------------------------------------------------------------


@in_loop
async def test_both_workers_get_the_request_at_once():
    async with world(*BOTH) as it:
        await it.ask(prompt=(5, 6), max_tokens=4)
        [to_prefill], [to_decode] = it.control.to("prefill-0", PrefillRequest), it.control.to("decode-0", DecodeRequest)
        assert to_prefill.request == to_decode.request
        assert to_prefill.request.prompt_token_ids == (5, 6)
        assert (to_prefill.request.attempt, len(to_prefill.request.request_id)) == (0, 32)
        assert to_prefill.target == DecodeTarget("decode-0", "g1", "tcp://127.0.0.1:0")
        assert to_decode.source == PrefillSource("prefill-0", "g1")
        assert decode_from_gateway(encode(to_prefill)) == to_prefill


@in_loop
async def test_a_request_from_prefill_through_decode_to_its_end():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=4)
        await it.say("prefill-0", spec, 0, [10])
        assert client.tokens == [10]  # before any hand-over
        await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER)
        await it.say("decode-0", spec, 1, [11])
        await it.say("decode-0", spec, 2, [12])
        assert client.finish is None
        await it.say("decode-0", spec, 3, [13], EndReason.LENGTH)
        assert client.tokens == [10, 11, 12, 13]
        assert [len(delta.token_ids) for delta in client.deltas] == [1, 1, 1, 1]
        assert client.finish is EndReason.LENGTH
        assert (cancels(it, "prefill-0"), cancels(it, "decode-0")) == (0, 0)
        it.assert_empty()


@in_loop
async def test_one_token_is_prefills_alone():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=1)
        assert it.control.to("prefill-0", PrefillRequest)[0].target is None
        assert it.control.to("decode-0", DecodeRequest) == []
        await it.say("prefill-0", spec, 0, [10], EndReason.LENGTH)
        assert (client.tokens, client.finish) == ([10], EndReason.LENGTH)
        assert cancels(it, "decode-0") == 0
        it.assert_empty()


@in_loop
async def test_a_first_token_that_is_the_last_cancels_decode():
    async with world(*BOTH) as it:
        client, spec = await started(it)
        await it.say("prefill-0", spec, 0, [2], EndReason.STOP)
        assert (client.tokens, client.finish) == ([2], EndReason.STOP)
        assert (cancels(it, "prefill-0"), cancels(it, "decode-0")) == (0, 1)
        it.assert_empty()


@in_loop
async def test_decode_may_repeat_the_first_token_and_be_heard_before_prefill():
    async with world(*BOTH) as it:
        early, spec = await started(it, max_tokens=4)
        await it.say("decode-0", spec, 1, [11, 12])
        assert early.tokens == []
        await it.say("decode-0", spec, 3, [13], EndReason.LENGTH)
        assert early.finish is None
        await it.say("prefill-0", spec, 0, [10])
        assert (early.tokens, early.finish) == ([10, 11, 12, 13], EndReason.LENGTH)
        assert cancels(it, "prefill-0") == 1  # it had not said that it has handed over

        repeating, spec = await started(it, max_tokens=3)
        await it.say("decode-0", spec, 0, [10, 11])
        await it.say("prefill-0", spec, 0, [10])
        await it.say("decode-0", spec, 1, [11, 12], EndReason.STOP)
        assert (repeating.tokens, repeating.finish) == ([10, 11, 12], EndReason.STOP)
        it.assert_empty()


@in_loop
async def test_many_requests_in_one_step_output_do_not_mix():
    async with world(*BOTH) as it:
        clients = [await it.ask(prompt=(number + 1,), max_tokens=2) for number in range(8)]
        specs = [message.request for message in it.control.to("prefill-0", PrefillRequest)]
        firsts = tuple(RequestOutput(spec.request_id, 0, 0, (spec.prompt_token_ids[0] + 10,)) for spec in specs)
        await it.hear("prefill-0", step(*firsts))
        for spec in reversed(specs):
            await it.say("decode-0", spec, 1, [spec.prompt_token_ids[0] + 20], EndReason.LENGTH)
        assert [client.tokens for client in clients] == [[number + 11, number + 21] for number in range(8)]
        it.assert_empty()


# --- refused at the door -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "texts"),
    [
        ({"prompt": ()}, ["empty"]),
        ({"prompt": (1, 100)}, ["outside of the vocabulary", "99"]),
        ({"prompt": (-1,)}, ["outside of the vocabulary"]),
        ({"prompt": (1,) * 995, "max_tokens": 6}, ["995", "6", "1001", "1000"]),
        ({"prompt": (1,) * 1200, "max_tokens": 1}, ["1200", "1000"]),
        ({"temperature": float("nan")}, ["sampling parameter"]),
        ({"max_tokens": 0}, ["sampling parameter"]),
        ({"logit_bias": {-1: 1.0}}, ["sampling parameter"]),
    ],
)
@in_loop
async def test_what_can_never_be_served_is_refused_before_any_worker_hears_of_it(params, texts):
    async with world(*BOTH) as it:
        client = await it.ask(**params)
        assert isinstance(client.error, InvalidRequestError)
        assert [text for text in texts if text not in str(client.error)] == []
        assert it.control.to("prefill-0", PrefillRequest) == []
        it.assert_empty()


@in_loop
async def test_the_longest_request_that_fits_is_taken():
    async with world(*BOTH) as it:
        client = await it.ask(prompt=(1,) * 995, max_tokens=5)
        assert client.error is None
        assert it.dispatcher.in_flight == 1


@in_loop
async def test_a_worker_whose_pool_is_smaller_than_a_request_is_refused():
    async with world("prefill-0") as it:
        tiny = msgspec.structs.replace(LIMITS, kv_tokens=999)
        await it.hear("decode-0", hello("decode-0", limits=tiny))
        assert it.control.to("decode-0", Refused) == [
            Refused("its KV pool holds 999 tokens, less than one request of 1000")
        ]


@pytest.mark.parametrize(
    ("present", "text"), [((), "no prefill"), (("prefill-0",), "no decode"), (("decode-0",), "no prefill")]
)
@in_loop
async def test_without_a_worker_of_each_role_nothing_is_taken(present, text):
    async with world(*present) as it:
        client = await it.ask()
        assert isinstance(client.error, UnavailableError)
        assert text in str(client.error)


@in_loop
async def test_a_stalled_worker_gets_no_new_requests():
    async with world(*BOTH, cluster=ClusterSettings(stalled_after_s=5, dead_after_s=100)) as it:
        await it.hear("decode-0", beat(progress=7, running=1))
        await it.pass_time(6, {"prefill-0": "g1"})
        client = await it.ask()
        assert isinstance(client.error, UnavailableError)
        assert str(client.error) == "no decode worker can take requests"


@in_loop
async def test_more_than_the_limit_is_an_overload_and_room_is_made_by_an_end():
    async with world(*BOTH, settings=DispatchSettings(max_in_flight=2, tick_s=3600)) as it:
        first, _ = await it.ask(), await it.ask()
        third = await it.ask()
        assert isinstance(third.error, OverloadedError)
        await first.leave()
        assert (await it.ask()).error is None


@pytest.mark.parametrize(("unreachable", "cancelled"), [("prefill-0", 0), ("decode-0", 1)])
@in_loop
async def test_a_worker_that_can_not_be_reached_fails_the_request_and_cancels_the_other(unreachable, cancelled):
    async with world(*BOTH) as it:
        it.control.unreachable.add(unreachable)
        client = await it.ask()
        assert isinstance(client.error, UnavailableError)
        other = next(worker_id for worker_id in BOTH if worker_id != unreachable)
        assert cancels(it, other) == cancelled
        it.assert_empty()


@pytest.mark.parametrize("unreachable", ["prefill-0", "decode-0"])
@in_loop
async def test_a_worker_that_can_not_be_reached_is_no_black_hole_while_another_lives(unreachable):
    async with world("prefill-0", "prefill-1", "decode-0", "decode-1") as it:
        it.control.unreachable.add(unreachable)
        clients = [await it.ask() for _ in range(3)]
        assert [client.error for client in clients] == [None] * 3
        assert unreachable not in {worker.worker_id for worker in it.dispatcher.workers}
        spare = unreachable.replace("0", "1")
        kind = PrefillRequest if spare.startswith("prefill") else DecodeRequest
        assert len(it.control.to(spare, kind)) == 3
        for client in clients:
            await client.leave()
        it.assert_empty()


# --- bad ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_id", BOTH)
@pytest.mark.parametrize(
    ("reason", "error", "text"),
    [
        (EndReason.REJECTED, InvalidRequestError, "9 > 8"),
        (EndReason.OVERLOADED, OverloadedError, "limit"),
        (EndReason.FAILED, RequestFailedError, "could not finish"),
        (EndReason.CANCELLED, RequestFailedError, "could not finish"),
    ],
)
@in_loop
async def test_an_error_end_of_one_worker_cancels_the_other(worker_id, reason, error, text):
    async with world(*BOTH, settings=ONE_TRY) as it:
        client, spec = await started(it)
        await it.say(worker_id, spec, 0, end=reason, message="9 > 8")
        assert type(client.error) is error
        assert text in str(client.error)
        assert "9 > 8" not in str(client.error) or reason is EndReason.REJECTED
        other = next(other for other in BOTH if other != worker_id)
        assert (cancels(it, worker_id), cancels(it, other)) == (0, 1)
        it.assert_empty()


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ([("prefill-0", 0, [10]), ("decode-0", 0, [11])], "disagree about output token 0"),
        ([("decode-0", 1, [11, 12]), ("decode-0", 1, [13])], "disagree about output token 1"),
        ([("prefill-0", 0, [10]), ("decode-0", 1, [11]), ("decode-0", 3, [13])], "tokens 2 to 2 were lost"),
        ([("decode-0", 2, [12])], "tokens 1 to 1 were lost"),
        ([("prefill-0", 1, [11])], "tokens 0 to 0 were lost"),
        ([("decode-0", 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])], "more than the 8"),
    ],
)
@in_loop
async def test_outputs_that_contradict_or_miss_something_fail_the_request(says, text):
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=8)
        for worker_id, start, tokens in says:
            await it.say(worker_id, spec, start, tokens)
        assert isinstance(client.error, InconsistentOutputError)
        assert text in str(client.error)
        assert (cancels(it, "prefill-0"), cancels(it, "decode-0")) == (1, 1)
        it.assert_empty()


@in_loop
async def test_a_hand_over_that_nobody_asked_for_is_a_failure():
    async with world(*BOTH) as it:
        alone, spec = await started(it, max_tokens=1)
        await it.say("prefill-0", spec, 0, end=EndReason.HANDED_OVER)
        assert isinstance(alone.error, RequestFailedError)
        client, spec = await started(it)
        await it.say("decode-0", spec, 0, end=EndReason.HANDED_OVER)
        assert isinstance(client.error, RequestFailedError)
        it.assert_empty()


@in_loop
async def test_early_tokens_are_kept_within_a_bound():
    async with world(*BOTH, settings=DispatchSettings(stream_buffer_tokens=3, tick_s=3600)) as it:
        client, spec = await started(it, max_tokens=8)
        await it.say("decode-0", spec, 1, [1, 2])
        await it.say("prefill-0", spec, 0, [0])
        assert client.tokens == [0, 1, 2]
        other, spec = await started(it, max_tokens=8)
        await it.say("decode-0", spec, 1, [1, 2, 3])
        assert isinstance(other.error, InconsistentOutputError)
        assert it.dispatcher.in_flight == 1


@in_loop
async def test_words_said_again_change_nothing():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=8)
        await it.say("decode-0", spec, 1, [11, 12, 13])
        await it.say("decode-0", spec, 1, [11, 12])
        await it.say("prefill-0", spec, 0, [10])
        await it.say("prefill-0", spec, 0, [10])
        await it.say("decode-0", spec, 1, [11])
        await it.say("decode-0", spec, 4, [14])
        await it.say("decode-0", spec, 5, [15], EndReason.STOP)
        assert client.tokens == [10, 11, 12, 13, 14, 15]
        assert client.finish is EndReason.STOP
        it.assert_empty()


@pytest.mark.parametrize(
    "says",
    [
        [("decode-0", 1, [11, 12], None), ("prefill-0", 0, [10], EndReason.STOP)],
        [("decode-0", 1, [11, 12], EndReason.STOP), ("prefill-0", 0, [10], EndReason.LENGTH)],
        [("prefill-0", 0, [10], None), ("decode-0", 1, [11, 12], None), ("decode-0", 1, [11], EndReason.STOP)],
    ],
)
@in_loop
async def test_an_end_that_does_not_match_the_tokens_fails_the_request(says):
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=8)
        for worker_id, start, tokens, end in says:
            await it.say(worker_id, spec, start, tokens, end)
        assert isinstance(client.error, InconsistentOutputError)
        assert client.finish is None
        it.assert_empty()


# --- lost workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", BOTH)
@pytest.mark.parametrize("how", ["silence", "goodbye", "new generation", "malformed", "gave us up", "lost message"])
@in_loop
async def test_a_lost_worker_fails_its_requests_at_once(lost, how):
    async with world(*BOTH, settings=ONE_TRY) as it:
        other = next(worker_id for worker_id in BOTH if worker_id != lost)
        client, _ = await started(it)
        if how == "silence":
            await it.pass_time(2.5, {other: "g1"})
        elif how == "lost message":
            it.control.inbox.put_nowait((link(lost), step(sequence=it.said[lost][1] + 2)))
            await it.settle()
            assert it.control.to(lost, Reintroduce) == [Reintroduce(EPOCH)]
        else:
            message = {
                "goodbye": Goodbye("g1", "bye"),
                "new generation": hello(lost, "g2"),
                "malformed": MessageError("bad"),
                "gave us up": hello(lost, introduction=2),
            }[how]
            await it.hear(lost, message)
        assert type(client.error) is RequestFailedError
        assert str(client.error) == f"the {lost.split('-')[0]} worker of the request was lost"
        assert (cancels(it, lost), cancels(it, other)) == (0, 1)
        it.assert_empty()
        assert (how == "malformed") == bool(it.control.to(lost, Refused))


@in_loop
async def test_a_restarted_worker_takes_requests_again():
    async with world(*BOTH) as it:
        await it.hear("decode-0", Goodbye("g1", "bye"))
        assert isinstance((await it.ask()).error, UnavailableError)
        await it.join("decode-0", generation="g2")
        client, spec = await started(it, max_tokens=2)
        await it.say("prefill-0", spec, 0, [10])
        await it.say("decode-0", spec, 1, [11], EndReason.LENGTH, generation="g2")
        assert client.tokens == [10, 11]


@pytest.mark.parametrize("is_known_to_have_handed_over", [True, False])
@in_loop
async def test_prefill_may_go_once_decode_has_all(is_known_to_have_handed_over):
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=3)
        await it.say("prefill-0", spec, 0, [10])
        if is_known_to_have_handed_over:
            await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER)
        else:
            await it.say("decode-0", spec, 1, [11])  # so it has the KV, whether or not the news came through
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        assert client.error is None
        await it.say("decode-0", spec, 1, [11, 12], EndReason.LENGTH)
        assert (client.tokens, client.finish) == ([10, 11, 12], EndReason.LENGTH)
        it.assert_empty()


@pytest.mark.parametrize("heard", ["nothing", "only prefill", "only decode"])
@in_loop
async def test_prefill_may_not_go_before_that(heard):
    async with world(*BOTH, settings=ONE_TRY) as it:
        client, spec = await started(it)
        if heard == "only prefill":
            await it.say("prefill-0", spec, 0, [10])
        if heard == "only decode":  # token 0 is missing, and nobody can say it any more
            await it.say("decode-0", spec, 1, [11])
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        assert str(client.error) == "the prefill worker of the request was lost"
        assert cancels(it, "decode-0") == 1
        it.assert_empty()


@in_loop
async def test_outputs_of_a_lost_generation_reach_nobody():
    async with world(*BOTH) as it:
        client, spec = await started(it)
        await it.hear("decode-0", hello("decode-0", "g2"))
        await it.say("decode-0", spec, 0, [10], generation="g1")
        assert client.tokens == []


# --- clients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_token", [True, False])
@in_loop
async def test_a_client_that_leaves_cancels_on_both_workers(first_token):
    async with world(*BOTH) as it:
        client, spec = await started(it)
        if first_token:
            await it.say("prefill-0", spec, 0, [10])
        await client.leave()
        assert it.control.to("prefill-0", Cancel) == it.control.to("decode-0", Cancel) == [Cancel(spec.request_id, 0)]
        it.assert_empty()
        assert (it.recorder.outcomes[0].finish, it.recorder.outcomes[0].error) == (None, None)


@in_loop
async def test_an_iterator_that_is_dropped_cancels_too():
    async with world(*BOTH) as it:
        stream = it.dispatcher.generate((1, 2), sampling(), Traits(mode=Mode.DISAGGREGATED), arrived_at=100.0)
        waiting = asyncio.ensure_future(anext(stream))
        await it.settle()
        await it.reserve(it.spec("prefill-0", PrefillRequest))
        await it.say("prefill-0", it.spec("prefill-0", PrefillRequest), 0, [10])
        assert (await waiting).token_ids == (10,)
        del stream, waiting
        gc.collect()
        await it.settle()
        assert cancels(it, "decode-0") == 1
        it.assert_empty()


@in_loop
async def test_closing_after_the_end_cancels_nothing():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=2)
        await it.say("prefill-0", spec, 0, [10], EndReason.STOP)
        await client.leave()
        assert cancels(it, "decode-0") == 1
        assert len(it.recorder.outcomes) == 1


@in_loop
async def test_a_client_that_does_not_read_fails_alone():
    async with world(*BOTH, settings=DispatchSettings(stream_buffer_tokens=4, tick_s=3600)) as it:
        slow, slow_spec = await started(it, max_tokens=20)
        quick, quick_spec = await started(it, max_tokens=20)
        for spec in (slow_spec, quick_spec):
            await it.say("prefill-0", spec, 0, [50])
        slow.reading.clear()
        for index in range(1, 10):
            await it.say("decode-0", slow_spec, index, [50 + index])
            await it.say("decode-0", quick_spec, index, [50 + index])
        assert it.control.to("decode-0", Cancel)[0] == Cancel(slow_spec.request_id, 0)
        assert it.dispatcher.in_flight == 1
        slow.reading.set()
        await it.settle()
        assert isinstance(slow.error, OverloadedError)
        assert slow.tokens == [50 + index for index in range(len(slow.tokens))]
        assert quick.tokens == [50 + index for index in range(10)]


# --- time --------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_without_a_first_token_is_given_up_early():
    async with world(*BOTH, settings=DispatchSettings(first_token_timeout_s=5, request_timeout_s=9, tick_s=3600)) as it:
        client, _ = await started(it)
        await it.pass_time(4.5, LIVE)
        assert client.error is None
        await it.pass_time(0.5, LIVE)
        assert isinstance(client.error, DeadlineExceededError)
        assert str(client.error) == "no token came within the time this server allows"
        assert (cancels(it, "prefill-0"), cancels(it, "decode-0")) == (1, 1)
        it.assert_empty()


@in_loop
async def test_a_request_is_given_up_at_its_deadline():
    async with world(*BOTH, settings=DispatchSettings(first_token_timeout_s=5, request_timeout_s=9, tick_s=3600)) as it:
        client, spec = await started(it)
        await it.say("prefill-0", spec, 0, [10])
        await it.pass_time(8.5, LIVE)
        assert client.error is None
        await it.pass_time(0.5, LIVE)
        assert isinstance(client.error, DeadlineExceededError)
        assert str(client.error) == "the request took longer than this server allows"
        it.assert_empty()


@in_loop
async def test_workers_get_beats():
    async with world(*BOTH) as it:
        before = len(it.control.to("decode-0", GatewayBeat))
        await it.pass_time(2.0, LIVE)
        beats = it.control.to("decode-0", GatewayBeat)
        assert len(beats) - before == 4
        assert set(beats) == {GatewayBeat(EPOCH, 0)}


# --- late words --------------------------------------------------------------------------------------


@in_loop
async def test_late_outputs_are_counted_and_answered_with_one_cancel_a_tick():
    async with world(*BOTH) as it:
        client, spec = await started(it)
        await client.leave()
        for index in range(5):
            await it.say("decode-0", spec, index, [1])
        assert it.dispatcher.num_late_outputs == 5
        assert cancels(it, "decode-0") == 2
        it.dispatcher.tick()
        await it.say("decode-0", spec, 5, [1])
        assert cancels(it, "decode-0") == 3
        await it.say("decode-0", spec, 6, end=EndReason.CANCELLED)
        await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER)
        assert (cancels(it, "decode-0"), cancels(it, "prefill-0")) == (3, 1)
        assert it.dispatcher.num_late_outputs == 8


@in_loop
async def test_cancels_for_late_outputs_are_bounded():
    async with world(*BOTH) as it:
        outputs = tuple(RequestOutput(f"r{number}", 0, 0, (1,)) for number in range(1000))
        await it.hear("decode-0", step(*outputs))
        assert cancels(it, "decode-0") == 256
        assert it.dispatcher.num_late_outputs == 1000


@in_loop
async def test_another_attempt_or_another_worker_does_not_reach_the_request():
    async with world(*BOTH, "decode-1") as it:
        client, spec = await started(it)
        other_attempt = RequestOutput(spec.request_id, 1, 0, (66,))
        await it.hear("prefill-0", step(other_attempt))
        await it.say("decode-1", spec, 0, [66])
        assert client.tokens == []
        assert it.control.to("decode-1", Cancel) == [Cancel(spec.request_id, 0)]
        await it.say("prefill-0", spec, 0, [10])
        assert client.tokens == [10]


# --- our own bugs ------------------------------------------------------------------------------------


@in_loop
async def test_a_bug_in_handling_one_output_costs_that_request_only(monkeypatch, caplog):
    async with world(*BOTH) as it:
        broken, broken_spec = await started(it)
        fine, fine_spec = await started(it)
        flight = it.dispatcher._flights._flights[broken_spec.request_id]
        monkeypatch.setattr(flight.attempt.merge, "add", lambda *_: 1 // 0)
        await it.say("prefill-0", broken_spec, 0, [10])
        await it.say("prefill-0", fine_spec, 0, [10])
        assert (type(broken.error), str(broken.error)) == (RequestFailedError, "internal error")
        assert fine.tokens == [10]
        assert "ZeroDivisionError" in caplog.text


@in_loop
async def test_a_bug_in_handling_one_message_costs_its_sender_only(monkeypatch):
    async with world(*BOTH, "decode-1") as it:
        client = await it.ask()
        monkeypatch.setattr("gateway.worker.Worker.after_outputs", lambda *_: 1 // 0)
        await it.say("decode-1", it.spec("prefill-0", PrefillRequest), 0, [1])
        assert [worker.worker_id for worker in it.dispatcher.workers] == ["decode-0", "prefill-0"]
        assert client.error is None
        assert it.dispatcher.status().ready


@in_loop
async def test_a_second_process_with_a_workers_id_gets_its_own_answer_and_the_first_one_keeps_its_requests():
    async with world(*BOTH) as it:
        client, spec = await started(it)
        misfit = hello("decode-0", "g2", kv_endpoint=None)
        it.control.inbox.put_nowait((link("decode-0", "g2"), misfit))
        await it.settle()
        [(name, reply)] = [item for item in it.control.named if isinstance(item[1], Refused)]
        assert (name, reply.reason) == (
            link("decode-0", "g2"),
            "decode workers name a KV endpoint, prefill workers do not",
        )
        await it.say("prefill-0", spec, 0, [1], EndReason.HANDED_OVER)
        await it.say("decode-0", spec, 1, [2], EndReason.STOP)
        assert client.tokens == [1, 2]
        it.clock.now += 0.6
        it.dispatcher.tick()
        assert {name for name, _ in it.control.named[-2:]} == {link("decode-0"), link("prefill-0")}


@in_loop
async def test_when_the_loop_dies_run_raises_and_the_status_says_so():
    it = World(ClusterSettings(), DispatchSettings(tick_s=3600))
    running = asyncio.ensure_future(it.dispatcher.run(it.control))
    await it.join(*BOTH)
    assert it.dispatcher.status().ready
    client = await it.ask()
    it.control.inbox.put_nowait(OSError("socket closed"))
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert [str(error) for error in caught.value.exceptions] == ["socket closed"]
    await it.settle()
    assert isinstance(client.error, UnavailableError)
    assert not it.dispatcher.status().ready
    assert it.dispatcher.status().reasons == ("the gateway's control loop does not run",)
    assert isinstance((await it.ask()).error, UnavailableError)


@in_loop
async def test_stopping_fails_what_is_in_flight_and_cancels_it():
    async with world(*BOTH) as it:
        client, _ = await started(it)
    await it.settle()
    assert isinstance(client.error, UnavailableError)
    assert (cancels(it, "prefill-0"), cancels(it, "decode-0")) == (1, 1)
    assert it.dispatcher.in_flight == 0


@in_loop
async def test_a_backlog_does_not_starve_consumers():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=900)
        await it.say("prefill-0", spec, 0, [1])
        for index in range(1, 800):
            output = RequestOutput(spec.request_id, 0, index, (1,))
            it.control.inbox.put_nowait((link("decode-0"), step(output, sequence=index + 1)))  # 1 was the reservation
        for _ in range(100):
            await asyncio.sleep(0)
        assert 20 < len(client.tokens) < 800  # read while the backlog is being worked off


# --- metrics -----------------------------------------------------------------------------------------


@in_loop
async def test_the_observer_hears_where_the_time_went():
    async with world(*BOTH) as it:
        client = Client(it.dispatcher, (1, 2, 3), sampling(2), arrived_at=it.clock.now - 0.5)
        await it.settle()
        spec = it.spec("prefill-0", PrefillRequest)
        it.clock.now += 1.5
        await it.say("prefill-0", spec, 0, [10], events=PREFILL_READINGS)
        await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER, events={LifetimeEvent.ENDED: 1.75})
        it.clock.now += 1.0
        await it.say("decode-0", spec, 1, [11], EndReason.LENGTH, events=DECODE_READINGS)
        assert client.finish is EndReason.LENGTH
        [outcome] = it.recorder.outcomes
        assert (outcome.request_id, outcome.finish, outcome.error) == (spec.request_id, EndReason.LENGTH, None)
        assert outcome.phases == Phases.of(0.5, 3.0, PREFILL_READINGS, DECODE_READINGS, is_finished=True)
        assert outcome.phases.delivery_s == 0.25  # 3.0 - 0.5 - decode's 2.25


@in_loop
async def test_the_observer_hears_how_long_the_kv_took_even_when_the_request_is_over():
    async with world(*BOTH) as it:
        client, spec = await started(it)
        await it.say("prefill-0", spec, 0, [10], events=PREFILL_READINGS)
        await it.say("decode-0", spec, 1, [11], EndReason.STOP, events=DECODE_READINGS)
        assert client.finish is EndReason.STOP
        assert it.recorder.handovers == []
        events = {LifetimeEvent.KV_STARTED: 0.5, LifetimeEvent.KV_READY: 1.0, LifetimeEvent.KV_TAKEN: 1.25}
        await it.say("prefill-0", spec, 0, [10], EndReason.HANDED_OVER, events=events)
        assert it.recorder.handovers == [KvHandover(transfer_s=0.75, exposed_s=0.25)]


@in_loop
async def test_the_observer_hears_of_a_request_that_is_cut():
    async with world(*BOTH) as it:
        client, spec = await started(it)
        it.clock.now += 1.5
        await it.say("prefill-0", spec, 0, [10], events=PREFILL_READINGS)
        await client.leave()
        assert it.recorder.outcomes[0].phases == Phases(dispatch_s=0.0, queue_s=0.25, prefill_s=0.75, kv_reserve_s=0.0)


@pytest.mark.parametrize(("is_step", "num_told"), [(True, 0), (False, 1)])
@in_loop
async def test_a_step_of_a_call_is_not_told_to_the_observer(is_step, num_told):
    async with world(*BOTH) as it:
        client = await it.ask(max_tokens=1, mode=Mode.LOCAL, traits=Traits(is_step=is_step))
        await it.say("decode-0", it.spec("decode-0", DecodeRequest), 0, [10], EndReason.LENGTH)
        assert client.finish is EndReason.LENGTH
        assert len(it.recorder.outcomes) == num_told
        it.assert_empty()


@in_loop
async def test_workers_say_what_ends_an_output():
    async with world() as it:
        assert it.dispatcher.status().eos_token_ids == frozenset()
        await it.hear("decode-0", hello("decode-0", eos_token_ids=(2, 0)))
        assert it.dispatcher.status().eos_token_ids == {0, 2}


@in_loop
async def test_a_broken_observer_costs_nobody_a_request(monkeypatch):
    async with world(*BOTH) as it:
        monkeypatch.setattr(it.recorder, "on_request_end", lambda *_: 1 // 0)
        client, spec = await started(it)
        await it.join("decode-1")
        await it.say("prefill-0", spec, 0, [10], EndReason.STOP, events={LifetimeEvent.RECEIVED: 0.0})
        assert (client.tokens, client.error) == ([10], None)
        it.assert_empty()


@pytest.mark.parametrize("name", ["max_in_flight", "stream_buffer_tokens", "request_timeout_s", "tick_s"])
def test_settings_are_checked(name):
    with pytest.raises(SettingsError, match=name):
        DispatchSettings(**{name: 0})


# --- the log -----------------------------------------------------------------------------------------


@in_loop
async def test_refusals_and_garbage_are_one_line_a_sender(caplog):
    async with world(*BOTH) as it:
        for _ in range(20):
            await it.hear("stranger", MessageError("bad"))
            await it.hear("prefill-9", hello("prefill-9", protocol=1))
        lines = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
        assert lines == [
            "worker 'stranger' is refused: bad; run the same release everywhere",
            f"worker 'prefill-9' is refused: protocol version: 1 != {PROTOCOL_VERSION}; run the same release "
            "everywhere",
        ]
        assert it.cluster.num_malformed == 20
        assert len(it.control.to("stranger", Refused)) == len(it.control.to("prefill-9", Refused)) == 20
