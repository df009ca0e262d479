"""Prompts that decode computes itself: without a transfer, beside the running requests. Ends with 'all is empty'."""

from engine.request import RequestState, StepResult
from kvtransfer.request_parts import EndReason, LifetimeEvent
from tests.lifecycle.makers import EOS, Decode, outputs_of


def test_the_life_of_a_local_request():
    world = Decode(max_num_prefill_tokens=4)
    job = world.add(num_prompt=10, local=True, max_tokens=2, now=5.0)
    assert job.state is RequestState.RUNNING
    assert world.scheduler.take_commands() == [], "no transfer"
    [notice] = world.scheduler.take_outputs()
    assert notice.output.events == {LifetimeEvent.RECEIVED: 0.0, LifetimeEvent.RESERVED: 0.0}
    spans = []
    for now in (6.0, 7.0, 8.0):
        [row] = world.scheduler.schedule(now)
        spans.append((row.start, row.stop))
        world.scheduler.complete([row], StepResult([50 if row.samples else None]), now)
    assert spans == [(0, 4), (4, 8), (8, 10)]
    assert outputs_of(world) == [("r", 0, (50,), None)]
    world.step(now=9.0, token_id=51)
    [said] = world.scheduler.take_outputs()
    assert (said.output.start, said.output.token_ids, said.output.end.reason) == (1, (51,), EndReason.LENGTH)
    assert said.output.events == {
        LifetimeEvent.RECEIVED: 0.0,
        LifetimeEvent.RESERVED: 0.0,
        LifetimeEvent.RUNNING: 1.0,
        LifetimeEvent.FIRST_TOKEN: 3.0,
        LifetimeEvent.ENDED: 4.0,
    }
    world.check_all_is_empty()


def test_running_requests_get_a_token_in_each_step_beside_a_long_prompt():
    world = Decode(max_num_prefill_tokens=3)
    world.add("old", max_tokens=8)
    world.arrive("old")
    world.add("long", 12, local=True, max_tokens=1)
    for _ in range(4):
        rows = world.scheduler.schedule(1.0)
        assert [(row.request.key[0], row.count) for row in rows] == [("old", 1), ("long", 3)]
        world.scheduler.complete(rows, StepResult([60 if row.samples else None for row in rows]), 1.0)
    assert ("long", 0, (60,), EndReason.LENGTH) in outputs_of(world)
    world.scheduler.cancel(("old", 0), 2.0)
    world.check_all_is_empty()


def test_only_what_the_pool_has_lost_of_a_chat_is_computed():
    world = Decode(share_prefixes=True)
    job = world.add("turn 1", 6, max_tokens=8)
    world.arrive("turn 1", token_id=70)
    while world.step(token_id=70):
        pass
    world.scheduler.take_outputs()
    history = job.token_slice(0, job.num_tokens)
    follow = world.add("turn 2", prompt=[*history, 1, 2], local=True)
    assert follow.num_cached == 12
    assert [item.output.num_cached for item in world.scheduler.take_outputs()] == [12]
    [row] = world.scheduler.schedule(1.0)
    assert (row.start, row.stop) == (12, 16)
    world.scheduler.complete([row], StepResult([EOS]), 1.0)
    world.check_all_is_empty()


def test_the_last_token_of_a_prompt_is_always_computed():
    world = Decode(share_prefixes=True)
    world.add("old", 8)
    world.arrive("old", token_id=EOS)
    job = world.add("new", 8, local=True)
    assert job.num_cached == 4
    world.step(token_id=EOS)
    world.check_all_is_empty()


def test_waiting_for_room_is_bounded_by_the_queue_timeout():
    world = Decode(num_blocks=4, lease=1.0, queue_timeout=10.0)
    world.add("runs", 16)
    world.add("waits", 4, local=True, now=1.0)
    world.scheduler.expire(11.0)
    world.scheduler.take_outputs()
    world.scheduler.expire(11.1)
    [said] = world.scheduler.take_outputs()
    assert (said.output.request_id, said.output.end.reason) == ("waits", EndReason.OVERLOADED)
    world.arrive("runs", token_id=EOS)
    world.check_all_is_empty()


def test_local_and_transferred_requests_stand_in_one_queue():
    world = Decode(num_blocks=4)
    world.add("runs", 16)
    first = world.add("first", 8, local=True)
    second = world.add("second", 12)
    world.arrive("runs", token_id=EOS)
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.OFFERED)
    world.step(token_id=EOS)
    assert second.state is RequestState.RECEIVING
    world.arrive("second", token_id=EOS)
    world.check_all_is_empty()


def test_what_is_found_of_itself_after_a_preemption_was_not_cached():
    world = Decode(num_blocks=8, share_prefixes=True, max_num_prefill_tokens=2)
    old = world.add("old", prompt=[1, 2, 3, 4], max_tokens=24)
    world.arrive("old")
    new = world.add("new", prompt=range(40, 60), local=True, max_tokens=2)
    for _ in range(60):
        if new.output_token_ids:
            break
        world.step()
    assert world.scheduler.load().num_preemptions > 0, "it lost its blocks before its first token"
    assert new.num_cached == 0
    said = [item.output for item in world.scheduler.take_outputs() if item.output.request_id == "new"]
    assert {output.num_cached for output in said} == {0}
    assert world.scheduler.load().prefix_hits == 0
    for job in (old, new):
        world.scheduler.cancel(job.key, 9.0)
    world.check_all_is_empty()
