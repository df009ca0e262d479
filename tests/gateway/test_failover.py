"""Requests that outlive their workers: each rule on its own. Any order of events: test_dispatch_orders.py."""

from itertools import product

import pytest
from msgspec.structs import replace

from gateway.backend import DeadlineExceededError, InvalidRequestError, OverloadedError, RequestFailedError, Traits
from gateway.dispatch import DispatchSettings
from gateway.failover import SAME_WORKER_DELAY_S, Failover, FailoverSettings, RetryReason, SetbackError
from gateway.flight import Deadlines, Flight, FlightState, IllegalFlightMoveError
from gateway.stream import TokenStream
from kvtransfer.errors import SettingsError
from kvtransfer.messages import Cancel, DecodeRequest, Goodbye, PrefillRequest
from kvtransfer.request_parts import EndReason
from kvtransfer.worker_facts import LeaveCause
from tests.gateway.cluster_world import LIMITS, beat, hello, sampling, world
from tests.gateway.test_dispatch import BOTH, in_loop, started
from tests.gateway.test_phases import DECODE_READINGS, PREFILL_READINGS, sum_of

PAIRS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def settings(max_retries=3, timeout_s=30.0, **changes) -> DispatchSettings:
    return DispatchSettings(**{"tick_s": 3600, "failover": FailoverSettings(max_retries, timeout_s), **changes})


async def streaming(it, **params):
    """A request with tokens 10 and 11 at the client, the second one from decode."""
    client, spec = await started(it, **params)
    await it.say("prefill-0", spec, 0, [10])
    await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER)
    await it.say("decode-0", spec, 1, [11])
    assert client.tokens == [10, 11]
    return client, spec


def cancels(it, worker_id) -> list:
    return it.control.to(worker_id, Cancel)


def test_every_move_of_a_flight():
    waiting, held, streaming, over = FlightState
    legal = {
        (waiting, held),
        (waiting, streaming),
        (waiting, over),
        (held, streaming),
        (held, waiting),
        (held, over),
        (streaming, waiting),
        (streaming, over),
    }
    for old, new in product(FlightState, FlightState):
        flight = Flight(
            "r", (1,), sampling(), Traits(), TokenStream(8), Failover(FailoverSettings()), 0.0, Deadlines(1.0, 2.0), 4
        )
        flight.state = old
        if (old, new) in legal:
            flight.move(new)
            assert flight.state is new
        else:
            with pytest.raises(IllegalFlightMoveError, match=f"{old.name} -> {new.name}"):
                flight.move(new)


# --- the stream goes on ------------------------------------------------------------------------------


@in_loop
async def test_a_lost_decode_worker_is_replaced_at_once_and_the_stream_goes_on():
    async with world("prefill-0", "decode-0", "decode-1") as it:
        client, first = await streaming(it, max_tokens=5)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        spec = it.spec("decode-1", DecodeRequest)
        assert (spec.request_id, spec.attempt, spec.output_token_ids) == (first.request_id, 1, (10, 11))
        assert (spec.prompt_token_ids, spec.sampling) == (first.prompt_token_ids, first.sampling)
        [_, again] = it.control.to("prefill-0", PrefillRequest)
        assert (again.request, again.target.worker_id) == (spec, "decode-1")
        assert cancels(it, "prefill-0") == [], "it had handed over"
        await it.say("prefill-0", spec, 2, [12])
        assert client.tokens == [10, 11, 12], "nothing is held back from a stream that has begun"
        await it.say("decode-1", spec, 2, [12, 13])
        await it.say("decode-1", spec, 4, [14], EndReason.LENGTH)
        assert (client.tokens, client.finish) == ([10, 11, 12, 13, 14], EndReason.LENGTH)
        assert it.recorder.retries == [RetryReason.DECODE_LOST]
        it.assert_empty()


@in_loop
@pytest.mark.parametrize(
    ("cause", "reason", "what"),
    [
        (LeaveCause.FAILURE, RetryReason.DECODE_LOST, "was lost"),
        (LeaveCause.SHUTDOWN, RetryReason.WORKER_STOPPED, "left"),
        (LeaveCause.ROLE_SWITCH, RetryReason.ROLE_SWITCHED, "left"),
    ],
)
async def test_who_leaves_as_an_operator_wants_it_is_not_called_lost(cause, reason, what, caplog):
    async with world("prefill-0", "decode-0", "decode-1") as it:
        await streaming(it, max_tokens=5)
        await it.hear("decode-0", Goodbye("g1", "bye", cause))
        assert it.recorder.retries == [reason]
        assert f"has lost attempt 1: the decode worker of the request {what}" in caplog.text


@in_loop
async def test_what_a_failing_worker_says_is_for_the_log_alone(caplog):
    async with world("prefill-0", "decode-0") as it:
        client, spec = await started(it)
        await it.say("decode-0", spec, 0, end=EndReason.FAILED, message="the KV did not arrive: silence")
        assert "attempt 1: a worker could not finish the request: decode said 'the KV did not arrive" in caplog.text
        await it.pass_time(100, {"prefill-0": "g1"})
        assert "KV" not in str(client.error)


@in_loop
async def test_the_only_decode_worker_may_come_back():
    async with world(*BOTH) as it:
        client, _ = await streaming(it, max_tokens=4)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.pass_time(20, {"prefill-0": "g1"})
        assert (client.error, it.dispatcher.in_flight, it.recorder.retries) == (None, 1, [])
        await it.join("decode-0", generation="g2")
        spec = it.spec("decode-0", DecodeRequest)
        assert (spec.attempt, spec.output_token_ids) == (1, (10, 11))
        await it.say("prefill-0", spec, 2, [12])
        await it.say("decode-0", spec, 3, [13], EndReason.STOP, generation="g2")
        assert (client.tokens, client.finish) == ([10, 11, 12, 13], EndReason.STOP)
        it.assert_empty()


@in_loop
async def test_a_lost_prefill_worker_is_replaced_before_the_first_token():
    async with world("prefill-0", "prefill-1", "decode-0") as it:
        client, first = await started(it)
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        assert cancels(it, "decode-0") == [Cancel(first.request_id, 0)]
        spec = it.spec("prefill-1", PrefillRequest)
        assert (spec.attempt, spec.output_token_ids) == (1, ())
        assert it.spec("decode-0", DecodeRequest) == spec
        await it.reserve(spec)
        await it.say("prefill-1", spec, 0, [10], EndReason.STOP)
        assert (client.tokens, client.finish) == ([10], EndReason.STOP)
        assert it.recorder.retries == [RetryReason.PREFILL_LOST]
        it.assert_empty()


@in_loop
async def test_a_token_that_nobody_has_seen_is_kept_too():
    """Prefill's token is known and held back when both workers go: the next attempt starts behind it."""
    async with world(*BOTH) as it:
        client, first = await started(it, has_room=False, max_tokens=3)
        await it.say("prefill-0", first, 0, [10])
        assert client.tokens == []
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.join("decode-0", generation="g2")
        spec = it.spec("decode-0", DecodeRequest)
        assert spec.output_token_ids == (10,)
        assert cancels(it, "prefill-0") == [Cancel(first.request_id, 0)]
        await it.say("prefill-0", spec, 1, [11])
        assert client.tokens == []
        await it.reserve(spec, generation="g2")
        assert client.tokens == [10, 11]
        await it.say("decode-0", spec, 2, [12], EndReason.LENGTH, generation="g2")
        assert (client.tokens, client.finish) == ([10, 11, 12], EndReason.LENGTH)


@in_loop
async def test_when_one_token_is_missing_prefill_can_do_it_alone():
    async with world(*BOTH) as it:
        client, _ = await streaming(it, max_tokens=3)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        again = it.control.to("prefill-0", PrefillRequest)[-1]
        assert (again.target, again.request.output_token_ids) == (None, (10, 11))
        await it.say("prefill-0", again.request, 2, [12], EndReason.LENGTH)
        assert (client.tokens, client.finish) == ([10, 11, 12], EndReason.LENGTH)
        it.assert_empty()


@pytest.mark.parametrize(
    ("worker_id", "reason"), [("prefill-0", "FAILED"), ("decode-0", "FAILED"), ("decode-0", "CANCELLED")]
)
@in_loop
async def test_after_a_failure_both_workers_are_avoided(worker_id, reason):
    """A hand-over that fails is told by one side, and may be the other's fault."""
    async with world(*PAIRS) as it:
        client, first = await started(it)
        await it.say(worker_id, first, 0, end=EndReason[reason], message="the KV did not arrive")
        spec = it.spec("prefill-1", PrefillRequest)
        assert (spec.attempt, it.spec("decode-1", DecodeRequest)) == (1, spec)
        other = next(name for name in BOTH if name != worker_id)
        assert (cancels(it, worker_id), cancels(it, other)) == ([], [Cancel(first.request_id, 0)])
        assert it.recorder.retries == [RetryReason.FAILED]
        assert client.error is None


@in_loop
async def test_the_same_workers_are_tried_again_after_a_growing_delay():
    async with world(*BOTH, settings=settings(max_retries=2)) as it:
        client, spec = await streaming(it)
        live = dict.fromkeys(BOTH, "g1")
        for delay in (SAME_WORKER_DELAY_S, 2 * SAME_WORKER_DELAY_S):
            await it.say("decode-0", spec, 2, end=EndReason.FAILED)
            assert it.spec("decode-0", DecodeRequest) == spec
            it.clock.now += delay - 0.01
            it.dispatcher.tick()
            assert it.spec("decode-0", DecodeRequest) == spec
            await it.pass_time(0.02, live)
            spec = it.spec("decode-0", DecodeRequest)
        assert spec.attempt == 2
        await it.say("decode-0", spec, 2, end=EndReason.FAILED)
        assert type(client.error) is RequestFailedError
        assert str(client.error) == "a worker could not finish the request; given up after 2 retries"
        it.assert_empty()


@in_loop
async def test_prefill_that_is_lost_behind_the_hand_over_costs_no_retry():
    async with world(*BOTH) as it:
        client, spec = await streaming(it, max_tokens=3)
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        await it.say("decode-0", spec, 2, [12], EndReason.LENGTH)
        assert (client.tokens, it.recorder.retries) == ([10, 11, 12], [])


@in_loop
async def test_words_of_a_lost_attempt_are_dropped_counted_and_cancelled():
    async with world(*PAIRS) as it:
        client, old = await streaming(it)
        await it.say("prefill-0", old, 2, end=EndReason.FAILED)  # no longer its business
        await it.say("decode-0", old, 2, end=EndReason.FAILED)
        spec = it.spec("decode-1", DecodeRequest)
        await it.say("decode-0", old, 2, [66])
        await it.say("decode-0", spec, 2, [66])  # of the attempt that runs, but not from its worker
        await it.say("decode-1", old, 2, [66])
        assert client.tokens == [10, 11]
        assert it.dispatcher.num_late_outputs == 4
        assert cancels(it, "decode-0") == [Cancel(spec.request_id, 0), Cancel(spec.request_id, 1)]
        await it.say("prefill-1", spec, 2, [12])
        assert client.tokens == [10, 11, 12]


@in_loop
async def test_a_worker_that_can_not_be_reached_costs_no_retry():
    async with world("prefill-0", "decode-0", "decode-1", "decode-2") as it:
        client, _ = await streaming(it)
        it.control.unreachable.add("decode-1")
        await it.hear("decode-0", Goodbye("g1", "bye"))
        spec = it.spec("decode-2", DecodeRequest)
        assert (spec.attempt, spec.output_token_ids) == (2, (10, 11))
        assert [item.attempt for item in cancels(it, "prefill-0")] == [1]
        assert it.recorder.retries == [RetryReason.DECODE_LOST]
        assert client.error is None


@in_loop
async def test_a_draining_worker_gets_nothing_and_its_streams_go_elsewhere_when_it_leaves():
    async with world("prefill-0", "decode-0", "decode-1") as it:
        client, spec = await streaming(it, max_tokens=6)
        await it.hear("decode-0", beat(progress=2, running=1, draining=True))
        other = await it.ask(prompt=(7,))
        assert it.spec("decode-1", DecodeRequest).prompt_token_ids == (7,)
        await it.say("decode-0", spec, 2, [12])  # it goes on with what it has
        await it.hear("decode-0", Goodbye("g1", "shutting down"))
        resumed = it.spec("decode-1", DecodeRequest)
        assert (resumed.request_id, resumed.output_token_ids) == (spec.request_id, (10, 11, 12))
        assert (client.error, other.error) == (None, None)


# --- it ends nevertheless ----------------------------------------------------------------------------


@in_loop
async def test_waiting_for_workers_is_bounded_and_ends_in_one_error():
    async with world(*BOTH, settings=settings(timeout_s=10)) as it:
        client, _ = await streaming(it)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.pass_time(9.5, {"prefill-0": "g1"})
        assert client.error is None
        await it.pass_time(0.5, {"prefill-0": "g1"})
        assert type(client.error) is RequestFailedError
        assert str(client.error) == "the decode worker of the request was lost, and none took it over within 10 s"
        it.assert_empty()
        assert len(it.recorder.outcomes) == 1


@in_loop
async def test_deadlines_hold_while_a_request_waits():
    async with world(*BOTH, settings=settings(request_timeout_s=5)) as it:
        client, _ = await streaming(it)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.pass_time(5, {"prefill-0": "g1"})
        assert type(client.error) is DeadlineExceededError


@in_loop
async def test_a_client_may_leave_while_its_request_waits():
    async with world(*BOTH) as it:
        client, _ = await streaming(it)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await client.leave()
        it.assert_empty()
        await it.join("decode-0", generation="g2")
        assert len(it.control.to("decode-0", DecodeRequest)) == 1


@in_loop
async def test_a_rejection_is_never_tried_again():
    async with world(*PAIRS) as it:
        client, spec = await streaming(it)
        await it.say("decode-0", spec, 2, end=EndReason.REJECTED, message="9 > 8")
        assert (type(client.error), str(client.error)) == (InvalidRequestError, "9 > 8")
        assert it.recorder.retries == []
        it.assert_empty()


@in_loop
async def test_a_request_that_waits_counts_as_one_in_flight():
    async with world(*BOTH, settings=settings(max_in_flight=1)) as it:
        await streaming(it)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.join("decode-9", generation="g1")
        assert isinstance((await it.ask()).error, OverloadedError)


@in_loop
async def test_a_worker_that_takes_shorter_requests_only_is_no_replacement():
    async with world("prefill-0", "decode-0") as it:
        client, _ = await streaming(it, prompt=(1,) * 500, max_tokens=500)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        short = hello("decode-1", limits=replace(LIMITS, max_model_len=999))
        await it.hear("decode-1", short)
        assert it.control.to("decode-1", DecodeRequest) == []
        await it.join("decode-2")
        assert it.spec("decode-2", DecodeRequest).attempt == 1
        assert client.error is None


@in_loop
async def test_a_bug_in_placing_a_request_costs_that_request_only(monkeypatch, caplog):
    async with world(*BOTH) as it:
        client, _ = await streaming(it)
        fine, _ = await started(it)
        monkeypatch.setattr(it.dispatcher._placement, "_route", lambda flight: 1 // 0)
        await it.say("decode-0", it.spec("decode-0", DecodeRequest), 0, [10])
        first = it.control.to("decode-0", DecodeRequest)[0].request
        await it.say("decode-0", first, 2, end=EndReason.FAILED)
        assert str(client.error) == "internal error"
        assert "ZeroDivisionError" in caplog.text
        assert fine.error is None


# --- overload ----------------------------------------------------------------------------------------


@in_loop
async def test_nothing_reaches_the_client_before_decode_has_room():
    async with world(*BOTH) as it:
        client, spec = await started(it, has_room=False, max_tokens=3)
        await it.say("prefill-0", spec, 0, [10])
        assert client.tokens == []
        await it.reserve(spec)
        assert client.tokens == [10]
        late, spec = await started(it, has_room=False, max_tokens=3)
        await it.say("prefill-0", spec, 0, [10])
        await it.say("decode-0", spec, 0, [10, 11])  # who generates has room
        assert late.tokens == [10, 11]
        short, spec = await started(it, has_room=False, max_tokens=3)
        await it.say("prefill-0", spec, 0, [10], EndReason.STOP)  # and who is done needs none
        assert (short.tokens, short.finish) == ([10], EndReason.STOP)
        alone, spec = await started(it, has_room=False, max_tokens=1)
        await it.say("prefill-0", spec, 0, [10], EndReason.LENGTH)
        assert alone.tokens == [10]


@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize("worker_id", BOTH)
@in_loop
async def test_an_overload_before_anything_was_streamed_is_told_at_once(worker_id, first_token):
    async with world(*BOTH) as it:
        client, spec = await started(it, has_room=False)
        if first_token:
            await it.say("prefill-0", spec, 0, [10])
        await it.say(worker_id, spec, 0, end=EndReason.OVERLOADED)
        assert (type(client.error), client.error.status, client.tokens) == (OverloadedError, 429, [])
        assert it.recorder.retries == []
        it.assert_empty()


@in_loop
async def test_an_overloaded_worker_passes_a_new_request_on_once():
    async with world(*PAIRS, "decode-2") as it:
        client, spec = await started(it, has_room=False)
        await it.say("decode-0", spec, 0, end=EndReason.OVERLOADED)
        spec = it.spec("decode-1", DecodeRequest)
        assert spec.attempt == 1
        await it.say("decode-1", spec, 0, end=EndReason.OVERLOADED)
        assert type(client.error) is OverloadedError
        assert it.control.to("decode-2", DecodeRequest) == []
        assert it.recorder.retries == [RetryReason.OVERLOADED]
        it.assert_empty()


@in_loop
async def test_an_overload_behind_the_first_token_is_tried_again():
    async with world(*BOTH) as it:
        client, spec = await streaming(it)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.join("decode-0", generation="g2")
        spec = it.spec("decode-0", DecodeRequest)
        await it.say("decode-0", spec, 0, end=EndReason.OVERLOADED, generation="g2")
        assert client.error is None
        await it.pass_time(1.0, {"prefill-0": "g1", "decode-0": "g2"})
        assert it.spec("decode-0", DecodeRequest).attempt == 2
        assert it.recorder.retries == [RetryReason.DECODE_LOST, RetryReason.OVERLOADED]


# --- metrics -----------------------------------------------------------------------------------------


@in_loop
async def test_the_phases_of_a_request_with_two_attempts_add_up():
    async with world(*BOTH) as it:
        client, spec = await streaming(it, max_tokens=4)
        it.clock.now += 2.0
        await it.hear("decode-0", Goodbye("g1", "bye"))
        it.clock.now += 5.0
        await it.join("decode-0", generation="g2")
        spec = it.spec("decode-0", DecodeRequest)
        it.clock.now += 2.5
        await it.say("prefill-0", spec, 2, [12], events=PREFILL_READINGS)
        await it.say("decode-0", spec, 3, [13], EndReason.LENGTH, generation="g2", events=DECODE_READINGS)
        [outcome] = it.recorder.outcomes
        assert (client.finish, outcome.phases.retry_s) == (EndReason.LENGTH, 7.0)
        assert sum_of(outcome.phases) == 9.5
        assert outcome.phases.decode_s == 0.875


@in_loop
async def test_the_hand_off_gap_is_that_of_tokens_0_and_1():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=3)
        await it.say("prefill-0", spec, 0, [10])
        it.clock.now += 0.25
        await it.say("decode-0", spec, 1, [11])
        it.clock.now += 4.0
        await it.say("decode-0", spec, 2, [12], EndReason.LENGTH)
        lost, spec = await started(it, max_tokens=3)
        await it.say("prefill-0", spec, 0, [10])
        await it.hear("decode-0", Goodbye("g1", "bye"))
        await it.join("decode-0", generation="g2")
        spec = it.spec("decode-0", DecodeRequest)
        await it.say("prefill-0", spec, 1, [11])
        await it.say("decode-0", spec, 2, [12], EndReason.LENGTH, generation="g2")
        assert (client.error, lost.tokens) == (None, [10, 11, 12])
        assert [outcome.handoff_gap_s for outcome in it.recorder.outcomes] == [0.25, None]


# --- the decision alone ------------------------------------------------------------------------------


def setback(reason=RetryReason.FAILED, *suspects) -> SetbackError:
    error = OverloadedError("busy") if reason is RetryReason.OVERLOADED else RequestFailedError("lost")
    return SetbackError(reason, error, suspects)


def test_retries_are_counted_and_suspects_gathered():
    failover = Failover(FailoverSettings(max_retries=2))
    assert failover.on_setback(setback(RetryReason.FAILED, ("a", "1")), 0.0, has_streamed=True) is None
    assert failover.on_setback(setback(RetryReason.DECODE_LOST, ("b", "1")), 0.0, has_streamed=True) is None
    assert (failover.num_retries, failover.suspects) == (2, {("a", "1"), ("b", "1")})
    error = failover.on_setback(setback(), 0.0, has_streamed=True)
    assert str(error) == "lost; given up after 2 retries"


def test_without_retries_the_error_is_that_of_the_worker():
    error = Failover(FailoverSettings(max_retries=0)).on_setback(setback(), 0.0, has_streamed=False)
    assert (type(error), str(error)) == (RequestFailedError, "lost")


def test_elsewhere_is_at_once_and_the_same_again_is_later():
    failover = Failover(FailoverSettings())
    for number in range(3):
        failover.on_setback(setback(), 10.0, has_streamed=True)
        delay = SAME_WORKER_DELAY_S * 2**number
        assert failover.may_start(10.0, elsewhere=True)
        assert not failover.may_start(10.0 + 0.9 * delay, elsewhere=False)
        assert failover.may_start(10.0 + delay, elsewhere=False)


def test_a_request_that_was_turned_away_goes_elsewhere_or_not_at_all():
    failover = Failover(FailoverSettings())
    failover.on_setback(setback(RetryReason.OVERLOADED), 0.0, has_streamed=False)
    assert failover.refusal(elsewhere=True) is None
    assert str(failover.refusal(elsewhere=False)) == "busy"
    assert not failover.may_start(99.0, elsewhere=False)
    assert str(failover.on_setback(setback(RetryReason.OVERLOADED), 1.0, has_streamed=False)) == "busy"
    streamed = Failover(FailoverSettings())
    streamed.on_setback(setback(RetryReason.OVERLOADED), 0.0, has_streamed=True)
    assert streamed.refusal(elsewhere=False) is None


def test_nothing_is_overdue_before_a_setback():
    failover = Failover(FailoverSettings(timeout_s=5))
    assert failover.overdue(1e9) is None
    failover.on_setback(setback(), 10.0, has_streamed=True)
    assert failover.overdue(14.9) is None
    assert str(failover.overdue(15.0)) == "lost, and none took it over within 5 s"


@pytest.mark.parametrize("bounds", [(-1, 1.0), (1, -0.5)])
def test_settings_are_checked(bounds):
    with pytest.raises(SettingsError):
        FailoverSettings(*bounds)
