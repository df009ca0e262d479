"""Prompts that begin alike share blocks, on prefill and on decode. Every test ends with 'all is empty'."""

import pytest

from kvtransfer.incoming import ReceptionOutcome
from tests.lifecycle.makers import EOS, Decode, Prefill

PROMPT = list(range(20, 33))  # 13 tokens: three full blocks of four


def computed(world, request_id="old", prompt=PROMPT, **more):
    """A prompt that was computed and handed over: nobody owns its blocks any more."""
    job = world.add(request_id, prompt=prompt, **more)
    while job.state.value != "handing_over":
        assert world.step()
    world.ended(request_id)
    return job


def decoded(world, request_id="old", prompt=PROMPT, **more):
    world.add(request_id, prompt=prompt, **more)
    world.arrive(request_id, token_id=EOS)


def test_prefill_computes_only_what_is_new():
    world = Prefill(share_prefixes=True)
    computed(world)
    job = world.add("new", prompt=[*PROMPT[:9], 99, 98])
    assert world.step() == {"new": (8, 11)}
    assert job.num_cached == 8
    [said] = [item.output for item in world.scheduler.take_outputs() if item.output.request_id == "new"]
    assert said.num_cached == 8
    load = world.scheduler.load()
    assert (load.prefix_queries, load.prefix_hits) == (13 + 11, 8)
    world.ended("new")
    world.check_all_is_empty()


def test_prefill_always_computes_the_last_token():
    world = Prefill(share_prefixes=True)
    computed(world, prompt=PROMPT[:12])
    world.add("new", prompt=PROMPT[:12])
    assert world.step() == {"new": (8, 12)}
    world.ended("new")
    world.check_all_is_empty()


def test_what_is_being_computed_is_shared_as_soon_as_a_block_is_full():
    world = Prefill(share_prefixes=True, max_num_batched_tokens=8)
    first = world.add("first", prompt=PROMPT)
    world.step()
    second = world.add("second", prompt=PROMPT)
    world.step()
    assert second.num_cached == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    world.ended("first")
    world.ended("second")
    world.check_all_is_empty()


@pytest.mark.parametrize("salts", [("", "a"), ("a", ""), ("a", "b")])
def test_tenants_share_nothing(salts):
    world = Prefill(share_prefixes=True)
    computed(world, cache_salt=salts[0])
    job = computed(world, "new", cache_salt=salts[1])
    assert job.num_cached == 0
    world.check_all_is_empty()


def test_without_prefix_caching_nothing_is_shared():
    world = Prefill(share_prefixes=False)
    computed(world)
    assert computed(world, "new").num_cached == 0
    assert world.scheduler.load().prefix_hits == 0
    world.check_all_is_empty()


def test_decode_wants_only_what_it_does_not_hold():
    world = Decode(share_prefixes=True)
    decoded(world)
    job = world.add("new", prompt=[*PROMPT, 50, 51])
    assert job.num_cached == 12
    world.arrive("new", token_id=EOS)
    world.check_all_is_empty()


def test_decode_may_hold_all_of_a_prompt():
    world = Decode(share_prefixes=True)
    decoded(world, prompt=PROMPT[:12])
    job = world.add("new", prompt=PROMPT[:12])
    assert job.num_cached == job.num_prefill == 12
    world.arrive("new", token_id=70)
    assert world.step() == ["new"]
    assert len(job.block_ids) == 4, "the new token has a block of its own"
    world.scheduler.cancel(job.key, 3.0)
    world.check_all_is_empty()


def test_the_answer_is_shared_with_the_next_turn_of_a_chat():
    world = Decode(share_prefixes=True)
    job = world.add("turn 1", prompt=PROMPT[:6], max_tokens=8)
    world.arrive("turn 1", token_id=70)
    while world.step(token_id=70):
        pass
    history = job.token_slice(0, job.num_tokens)
    follow = world.add("turn 2", prompt=[*history, 1, 2, 3])
    assert follow.num_cached == 12, "13 of 14 tokens have their KV here; 12 fill blocks"
    world.arrive("turn 2", token_id=EOS)
    world.check_all_is_empty()


def test_kv_that_did_not_arrive_is_not_shared():
    world = Decode(share_prefixes=True)
    world.add("broken", prompt=PROMPT)
    world.ended("broken", ReceptionOutcome.FAILED)
    job = world.add("new", prompt=PROMPT)
    assert job.num_cached == 0
    world.arrive("new", token_id=EOS)
    world.check_all_is_empty()


def test_shared_blocks_are_counted_once_when_room_is_looked_for():
    world = Decode(num_blocks=6, block_size=4, share_prefixes=True)
    world.add("first", prompt=PROMPT)
    world.arrive("first", token_id=70)
    second = world.add("second", prompt=[*PROMPT[:12], 99])
    assert second.num_cached == 12
    assert world.pool.num_free == 1, "four blocks of the first, three of them shared, and one more"
    for request_id in ("first", "second"):
        world.scheduler.cancel((request_id, 0), 1.0)
    world.ended("second")
    world.check_all_is_empty()
