"""Where prompts are computed: what each mode asks of whom, the rule of auto, and what a lost attempt does to it."""

import pytest

from gateway.backend import InvalidRequestError, OverloadedError, Traits, UnavailableError
from gateway.dispatch import DispatchSettings
from gateway.failover import FailoverSettings, RetryReason
from gateway.merge import InconsistentOutputError, TokenMerge
from gateway.modes import Mode, ModeRules
from kvtransfer.errors import SettingsError
from kvtransfer.messages import Cancel, DecodeRequest, Goodbye, PrefillRequest
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.worker_facts import Limits, Role
from tests.gateway.cluster_world import RESERVED, beat, hello, step, world
from tests.gateway.test_dispatch import BOTH, in_loop
from tests.gateway.test_phases import LOCAL_READINGS, sum_of

AUTO, DISAGGREGATED, LOCAL = Mode.AUTO, Mode.DISAGGREGATED, Mode.LOCAL
LONG = tuple(range(100))  # 6 full blocks of 16 and 4 tokens


def rules(default=AUTO, threshold=20, **changes) -> DispatchSettings:
    return DispatchSettings(tick_s=3600, modes=ModeRules(default, threshold), **changes)


def asked_of(it, worker_id: str) -> list:
    kind = PrefillRequest if worker_id.startswith("prefill") else DecodeRequest
    return it.control.to(worker_id, kind)


async def served(it, prompt, worker_id="decode-0", tokens=(50, 51), mode=None, num_cached=0, **params):
    """A request that runs to its end on whichever workers it was given to; returns the client."""
    client = await it.ask(prompt=prompt, max_tokens=len(tokens), mode=mode, **params)
    spec = it.spec(worker_id, DecodeRequest)
    if client.mode is DISAGGREGATED:
        await it.reserve(spec, worker_id)
        await it.say("prefill-0", spec, 0, tokens[:1])
        await it.say("prefill-0", spec, 1, end=EndReason.HANDED_OVER)
        await it.say(worker_id, spec, 1, tokens[1:], EndReason.LENGTH)
    else:
        notice = RequestOutput(spec.request_id, spec.attempt, 0, events=RESERVED, num_cached=num_cached)
        await it.hear(worker_id, step(notice))
        await it.say(worker_id, spec, 0, tokens, EndReason.LENGTH)
    assert (client.tokens, client.finish) == (list(tokens), EndReason.LENGTH), client.error
    return client


# --- one request in local mode -----------------------------------------------------------------------


@in_loop
async def test_a_local_request_is_decodes_alone():
    async with world(*BOTH) as it:
        client = await it.ask(prompt=(5, 6), max_tokens=3, mode=LOCAL)
        [message] = asked_of(it, "decode-0")
        assert (message.request.prompt_token_ids, message.source) == ((5, 6), None)
        assert asked_of(it, "prefill-0") == []
        assert client.mode is LOCAL
        await it.reserve(message.request)
        await it.say("decode-0", message.request, 0, [10])
        await it.say("decode-0", message.request, 1, [11])
        await it.say("decode-0", message.request, 2, [12], EndReason.LENGTH)
        assert (client.tokens, client.finish) == ([10, 11, 12], EndReason.LENGTH)
        it.assert_empty()


@in_loop
async def test_a_local_request_of_one_token_is_decodes_too():
    async with world(*BOTH) as it:
        client = await served(it, (1, 2), tokens=(50,), mode=LOCAL)
        assert (client.mode, asked_of(it, "prefill-0")) == (LOCAL, [])
        it.assert_empty()


@in_loop
async def test_a_first_token_that_was_lost_is_seen_at_once():
    async with world(*BOTH, settings=rules(failover=FailoverSettings(0))) as it:
        client = await it.ask(mode=LOCAL, max_tokens=4)
        spec = it.spec("decode-0", DecodeRequest)
        await it.say("decode-0", spec, 1, [11])
        assert isinstance(client.error, InconsistentOutputError)
        assert it.control.to("decode-0", Cancel) == [Cancel(spec.request_id, 0)]
        it.assert_empty()


def test_decode_alone_speaks_from_the_first_new_token():
    merge = TokenMerge(5, 4, [7, 8], is_decode_alone=True)
    merge.add(Role.DECODE, 2, [9])
    merge.add(Role.DECODE, 2, [9, 10])
    assert (list(merge.tokens), merge.num_new) == ([7, 8, 9, 10], 2)
    with pytest.raises(InconsistentOutputError, match="lost on the way"):
        merge.add(Role.DECODE, 5, [12])


@in_loop
async def test_decode_can_turn_a_local_request_away_until_it_has_room():
    async with world(*BOTH) as it:
        client = await it.ask(mode=LOCAL)
        await it.say("decode-0", it.spec("decode-0", DecodeRequest), 0, end=EndReason.OVERLOADED)
        assert isinstance(client.error, OverloadedError)
        client = await it.ask(mode=LOCAL, max_tokens=4)
        spec = it.spec("decode-0", DecodeRequest)
        await it.reserve(spec)
        await it.say("decode-0", spec, 0, [10])
        await it.say("decode-0", spec, 1, end=EndReason.OVERLOADED)
        await it.pass_time(1.0, {"decode-0": "g1", "prefill-0": "g1"})
        again = it.spec("decode-0", DecodeRequest)
        assert (client.error, again.attempt, again.output_token_ids) == (None, 1, (10,))


@in_loop
async def test_a_rejection_by_decode_is_the_clients():
    async with world(*BOTH) as it:
        client = await it.ask(mode=LOCAL)
        spec = it.spec("decode-0", DecodeRequest)
        await it.say("decode-0", spec, 0, end=EndReason.REJECTED, message="too long")
        assert isinstance(client.error, InvalidRequestError)
        it.assert_empty()


@in_loop
async def test_the_phases_of_a_local_request_add_up_and_it_hands_nothing_over():
    async with world(*BOTH) as it:
        await it.ask(mode=LOCAL, max_tokens=2)
        spec = it.spec("decode-0", DecodeRequest)
        await it.reserve(spec)
        await it.say("decode-0", spec, 0, [10])
        it.clock.now += 3.0
        output = RequestOutput(spec.request_id, 0, 1, (11,), RequestEnd(EndReason.LENGTH), LOCAL_READINGS)
        await it.hear("decode-0", step(output))
        [outcome] = it.recorder.outcomes
        phases = outcome.phases
        assert (outcome.mode, outcome.handoff_gap_s) == (LOCAL, None)
        assert (phases.queue_s, phases.prefill_s, phases.decode_s, phases.delivery_s) == (0.25, 0.75, 1.25, 0.75)
        assert (phases.kv_reserve_s, phases.kv_start_s, phases.kv_transfer_s, phases.batch_wait_s) == (None,) * 4
        assert sum_of(phases) == 3.0


# --- who may be asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "ready"),
    [
        ((), {AUTO: False, LOCAL: False, DISAGGREGATED: False}),
        (("prefill-0",), {AUTO: False, LOCAL: False, DISAGGREGATED: False}),
        (("decode-0",), {AUTO: True, LOCAL: True, DISAGGREGATED: False}),
        (BOTH, {AUTO: True, LOCAL: True, DISAGGREGATED: True}),
    ],
)
@in_loop
async def test_what_each_mode_needs(present, ready):
    for default in Mode:
        async with world(*present, settings=rules(default)) as it:
            assert {mode: it.dispatcher.status(mode).ready for mode in Mode} == ready
            assert it.dispatcher.status().ready is ready[default]


@pytest.mark.parametrize("mode", [AUTO, LOCAL, None])
@in_loop
async def test_without_prefill_decode_serves_alone(mode):
    async with world("decode-0", settings=rules()) as it:
        client = await served(it, LONG, mode=mode)
        assert client.mode is LOCAL
        refused = await it.ask(mode=DISAGGREGATED)
        assert isinstance(refused.error, UnavailableError)
        assert "no prefill worker" in str(refused.error)
        it.assert_empty()


@in_loop
async def test_the_length_that_fits_is_that_of_the_workers_needed():
    async with world("decode-0") as it:
        short = hello("prefill-0", limits=Limits(500, 8, 2000))
        await it.hear("prefill-0", short)
        await it.hear("prefill-0", beat())
        lengths = {mode: it.dispatcher.status(mode).max_model_len for mode in Mode}
        assert lengths == {AUTO: 1000, LOCAL: 1000, DISAGGREGATED: 500}
        client = await it.ask(prompt=LONG * 6, mode=AUTO)
        assert client.mode is LOCAL, "prefill can't take it"


@in_loop
async def test_a_request_without_a_mode_has_the_default():
    for default in (DISAGGREGATED, LOCAL):
        async with world(*BOTH, settings=rules(default)) as it:
            assert (await it.ask(mode=None)).mode is default


# --- auto --------------------------------------------------------------------------------------------


def test_the_rule():
    assert ModeRules(AUTO, 64).prefers_local(64, 0)
    assert not ModeRules(AUTO, 64).prefers_local(65, 0)
    assert ModeRules(AUTO, 64).prefers_local(1064, 1000)
    assert not ModeRules(AUTO, 64).prefers_local(1065, 1000)
    assert not ModeRules(AUTO, 0).prefers_local(1, 1)
    with pytest.raises(SettingsError):
        ModeRules(AUTO, -1)


@pytest.mark.parametrize(
    ("length", "threshold", "mode"), [(20, 20, LOCAL), (21, 20, DISAGGREGATED), (1, 0, DISAGGREGATED)]
)
@in_loop
async def test_short_prompts_are_local(length, threshold, mode):
    async with world(*BOTH, settings=rules(threshold=threshold)) as it:
        assert (await it.ask(prompt=range(length))).mode is DISAGGREGATED, "it was asked for"
        assert (await it.ask(prompt=range(length), mode=AUTO)).mode is mode


@pytest.mark.parametrize("first_mode", [DISAGGREGATED, LOCAL])
@in_loop
async def test_the_next_turn_of_a_chat_goes_where_the_last_one_was(first_mode):
    async with world(*BOTH, settings=rules()) as it:
        first = await served(it, LONG, tokens=tuple(range(60, 80)), mode=first_mode)
        history = (*LONG, *first.tokens)  # 119 tokens have KV: 7 blocks, 112 tokens
        second = await served(it, (*history, *range(12)), num_cached=112, mode=AUTO)
        assert second.mode is LOCAL, "20 tokens to compute"
        third = await it.ask(prompt=(*history, *range(40, 53)), mode=AUTO)
        assert third.mode is DISAGGREGATED, "21 tokens to compute"
        other = await it.ask(prompt=(99, *history[1:]), mode=AUTO)
        assert other.mode is DISAGGREGATED, "another beginning"


@in_loop
async def test_a_prompt_is_known_as_soon_as_decode_speaks_and_when_the_client_leaves():
    async with world(*BOTH, settings=rules()) as it:
        client = await it.ask(prompt=LONG, max_tokens=100)
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is DISAGGREGATED, "decode has nothing yet"
        spec = asked_of(it, "decode-0")[0].request
        await it.reserve(spec)
        await it.say("prefill-0", spec, 0, [50])
        await it.say("decode-0", spec, 1, [51])
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is LOCAL
        told = list(range(52, 92))
        await it.say("decode-0", spec, 2, told)
        await client.leave()
        history = (*LONG, 50, 51, *told)
        assert (await it.ask(prompt=(*history, 1), mode=AUTO)).mode is LOCAL


@in_loop
async def test_a_wrong_guess_is_corrected_by_what_decode_says():
    async with world(*BOTH, settings=rules()) as it:
        await served(it, LONG, mode=DISAGGREGATED)
        client = await it.ask(prompt=LONG, mode=AUTO)
        assert client.mode is LOCAL
        spec = it.spec("decode-0", DecodeRequest)
        notice = RequestOutput(spec.request_id, 0, 0, events=RESERVED, num_cached=32)
        await it.hear("decode-0", step(notice))
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is DISAGGREGATED, "68 tokens are missing"
        assert (await it.ask(prompt=LONG[:50], mode=AUTO)).mode is LOCAL, "18 are"
        await it.say("decode-0", spec, 0, [50])
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is LOCAL, "it has computed them since"


@in_loop
async def test_nothing_is_expected_of_a_worker_that_shares_no_prefixes():
    async with world("prefill-0", settings=rules()) as it:
        await it.hear("decode-0", hello("decode-0", shares_prefixes=False))
        await it.hear("decode-0", beat())
        await served(it, LONG, mode=DISAGGREGATED)
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is DISAGGREGATED
        assert len(it.dispatcher._flights.held) == 1, "those of prefill alone"


@in_loop
async def test_another_salt_shares_nothing():
    """Neither KV nor, by the mode in the answer, the news that somebody has sent this prompt before."""
    async with world(*BOTH, settings=rules()) as it:
        await served(it, LONG, mode=DISAGGREGATED, traits=Traits("one tenant"))
        assert (await it.ask(prompt=LONG, mode=AUTO, traits=Traits("another"))).mode is DISAGGREGATED
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is DISAGGREGATED
        assert (await it.ask(prompt=LONG, mode=AUTO, traits=Traits("one tenant"))).mode is LOCAL


@in_loop
async def test_emptied_caches_hold_nothing():
    async with world(*BOTH, settings=rules()) as it:
        await served(it, LONG, mode=DISAGGREGATED)
        it.dispatcher.reset_prefix_cache()
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is DISAGGREGATED


@in_loop
async def test_what_decode_found_of_a_local_prompt_is_told():
    async with world(*BOTH, settings=rules()) as it:
        client = await served(it, LONG, mode=LOCAL, num_cached=48)
        assert client.deltas[0].num_cached == 48


@in_loop
async def test_a_worker_that_has_gone_holds_nothing():
    async with world(*BOTH, settings=rules()) as it:
        await served(it, LONG, mode=DISAGGREGATED)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        assert len(it.dispatcher._flights.held) == 1, "those of prefill alone"
        await it.join("decode-0", generation="g2")
        assert (await it.ask(prompt=LONG, mode=AUTO)).mode is DISAGGREGATED


@in_loop
async def test_a_chat_stays_with_its_decode_worker_while_others_are_about_as_busy():
    async with world(*BOTH, "decode-1", settings=rules()) as it:
        await it.hear("decode-0", beat(progress=2, usage=0.05))
        await served(it, LONG, "decode-1", mode=DISAGGREGATED)
        await it.hear("decode-0", beat(progress=3))
        await it.hear("decode-1", beat(progress=3, usage=0.05))
        again = await it.ask(prompt=LONG, mode=AUTO)
        assert (again.mode, len(asked_of(it, "decode-1"))) == (LOCAL, 2)
        await again.leave()
        await it.hear("decode-1", beat(progress=4, usage=0.5))
        elsewhere = await it.ask(prompt=LONG, mode=AUTO)
        assert (elsewhere.mode, len(asked_of(it, "decode-0"))) == (DISAGGREGATED, 1)


# --- what a lost attempt does to it ------------------------------------------------------------------


@in_loop
async def test_a_local_stream_outlives_its_worker_in_whatever_mode_there_is_then():
    async with world("prefill-0", "decode-0", "decode-1", settings=rules()) as it:
        client = await it.ask(prompt=range(15), max_tokens=30, mode=AUTO)
        spec = it.spec("decode-0", DecodeRequest)
        await it.reserve(spec)
        told = list(range(30, 50))
        await it.say("decode-0", spec, 0, told)
        await it.hear("decode-0", Goodbye("g1", "bye"))
        [to_prefill], [to_decode] = asked_of(it, "prefill-0"), asked_of(it, "decode-1")
        assert to_prefill.request == to_decode.request, "35 tokens are no short prompt any more"
        assert (to_decode.request.attempt, to_decode.request.output_token_ids) == (1, tuple(told))
        assert client.mode is LOCAL, "that of the first attempt"
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        last = asked_of(it, "decode-1")[-1]
        assert (last.source, last.request.attempt) == (None, 2)
        await it.say("decode-1", last.request, 20, [50], EndReason.STOP)
        assert (client.tokens, client.finish) == ([*told, 50], EndReason.STOP)
        assert it.recorder.retries == [RetryReason.DECODE_LOST, RetryReason.PREFILL_LOST]
        it.assert_empty()


@in_loop
async def test_an_explicit_mode_waits_for_its_workers():
    async with world(*BOTH, settings=rules()) as it:
        client = await it.ask(mode=DISAGGREGATED)
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        await it.pass_time(5.0, {"decode-0": "g1"})
        assert (client.error, len(asked_of(it, "decode-0"))) == (None, 1)
        await it.join("prefill-0", generation="g2")
        assert [message.source is None for message in asked_of(it, "decode-0")] == [False, False]


@in_loop
async def test_where_the_way_between_two_workers_is_broken_auto_goes_round_it():
    async with world("prefill-0", "decode-0", "decode-1", settings=rules()) as it:
        await it.ask(prompt=LONG, mode=AUTO)
        await it.say("decode-0", it.spec("decode-0", DecodeRequest), 0, end=EndReason.FAILED)
        [message] = asked_of(it, "decode-1")
        assert (message.source, message.request.attempt) == (None, 1)


@in_loop
async def test_a_full_prefill_worker_is_no_reason_to_burden_decode():
    async with world(*BOTH, settings=rules()) as it:
        client = await it.ask(prompt=LONG, mode=AUTO)
        await it.say("prefill-0", it.spec("prefill-0", PrefillRequest), 0, end=EndReason.OVERLOADED)
        assert isinstance(client.error, OverloadedError)
        assert len(asked_of(it, "decode-0")) == 1
        it.assert_empty()


@in_loop
async def test_prefill_alone_gives_the_last_token_when_decode_has_gone():
    async with world(*BOTH, settings=rules()) as it:
        client = await it.ask(prompt=(1, 2), max_tokens=2, mode=AUTO)
        spec = it.spec("decode-0", DecodeRequest)
        await it.reserve(spec)
        await it.say("decode-0", spec, 0, [10])
        await it.hear("decode-0", Goodbye("g1", "bye"))
        [message] = asked_of(it, "prefill-0")
        assert (message.target, message.request.output_token_ids) == (None, (10,))
        await it.say("prefill-0", message.request, 1, [11], EndReason.LENGTH)
        assert (client.tokens, client.finish) == ([10, 11], EndReason.LENGTH)
        it.assert_empty()
