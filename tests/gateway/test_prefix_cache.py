"""What the gateway does about prefix caches: usage, tenants, priority, and emptying them."""

import pytest

from gateway.backend import TokenDelta, Traits
from kvtransfer.messages import PrefillRequest, ResetPrefixCache
from kvtransfer.request_parts import EndReason, RequestOutput
from tests.gateway.cluster_world import hello, step
from tests.gateway.cluster_world import world as cluster
from tests.gateway.http_world import ScriptedBackend, ids_of, make_world
from tests.gateway.test_streaming import events_of

BOTH = ("prefill-0", "decode-0")


def cached(count: int) -> ScriptedBackend:
    ids = ids_of("ab")
    return ScriptedBackend(
        lambda *_: [TokenDelta(ids[:1], None, num_cached=count), TokenDelta(ids[1:], EndReason.LENGTH)]
    )


def test_usage_says_how_much_of_the_prompt_was_cached():
    usage = make_world(cached(3)).complete().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert make_world().chat().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_usage_adds_up_the_prompts_of_a_call():
    usage = make_world(cached(2)).complete(prompt=["hello", "hello"]).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("option", ["include_usage", "continuous_usage_stats"])
def test_a_stream_says_so_too(option):
    events = events_of(make_world(cached(3)).complete(stream=True, stream_options={option: True}))
    said = [event["usage"] for event in events[:-1] if event.get("usage")]
    assert said
    assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in said} == {3}


def test_salt_and_priority_reach_the_workers():
    backend = ScriptedBackend()
    world = make_world(backend)
    world.complete(cache_salt="tenant", priority=-3)
    world.chat(priority=7)
    assert backend.traits == [Traits("tenant", -3), Traits("", 7)]


@pytest.mark.parametrize(
    "fields",
    [{"cache_salt": ""}, {"cache_salt": "x" * 513}, {"cache_salt": 1}, {"priority": 1 << 31}, {"priority": 1.5}],
)
def test_wrong_salts_and_priorities_are_refused(fields):
    response = make_world().complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


def test_the_cache_can_be_emptied():
    backend = ScriptedBackend()
    assert make_world(backend).ask("POST", "/reset_prefix_cache").status_code == 200
    assert backend.num_resets == 1
    assert make_world(ScriptedBackend(reasons=("why",))).ask("POST", "/reset_prefix_cache").status_code == 503


# --- behind the HTTP face


@pytest.mark.anyio
async def test_every_worker_is_told_to_empty_its_cache():
    async with cluster(*BOTH) as it:
        it.dispatcher.reset_prefix_cache()
        for worker_id in ("prefill-0", "decode-0"):
            assert it.control.to(worker_id, ResetPrefixCache) == [ResetPrefixCache()]
        assert it.control.num_sent == {"prefill-0": 1, "decode-0": 1}, "numbered like all that must not be lost"


@pytest.mark.anyio
async def test_a_worker_that_was_away_is_told_when_it_comes_back():
    async with cluster(*BOTH) as it:
        await it.pass_time(3.0, {"prefill-0": "g1"})
        it.dispatcher.reset_prefix_cache()
        assert it.control.to("decode-0", ResetPrefixCache) == []
        await it.hear("decode-0", hello("decode-0", introduction=2))
        assert it.control.to("decode-0", ResetPrefixCache) == [ResetPrefixCache()]


@pytest.mark.anyio
async def test_what_prefill_found_comes_with_the_first_delta_and_only_there():
    async with cluster(*BOTH) as it:
        client = await it.ask(max_tokens=3)
        spec = it.spec("prefill-0", PrefillRequest)
        await it.reserve(spec)
        await it.hear("prefill-0", step(RequestOutput(spec.request_id, 0, 0, (5,), None, {}, 2)))
        await it.say("decode-0", spec, 0, [5, 6])
        await it.say("decode-0", spec, 2, [7], EndReason.LENGTH)
        assert [delta.num_cached for delta in client.deltas] == [2, 0, 0]


@pytest.mark.anyio
async def test_salt_and_priority_stay_with_a_request_that_is_resumed():
    async with cluster(*BOTH) as it:
        client = await it.ask(max_tokens=8, traits=Traits("tenant", 3))
        first = it.spec("prefill-0", PrefillRequest)
        await it.say("prefill-0", first, 0, [], EndReason.FAILED)
        await it.pass_time(2.0, {"prefill-0": "g1", "decode-0": "g1"})
        again = it.spec("prefill-0", PrefillRequest)
        assert again.attempt == 1
        assert {(spec.cache_salt, spec.priority) for spec in (first, again)} == {("tenant", 3)}
        client.task.cancel()
