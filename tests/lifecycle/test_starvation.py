"""Nobody waits for ever who should not: while others keep coming, how many steps does each take to get on?

By arrival, everybody gets on. By priority, who is less important starves as long as more important ones come: that is
what priorities say, and it hears of it in time. In either order the first one gets on in every step.
"""

import pytest

from decode.scheduler import GrantKv
from engine.request import RequestState, StepResult
from kvtransfer.request_parts import EndReason
from tests.lifecycle.makers import Decode, Prefill, outputs_of


def step(world, now=2.0):
    """One step; tokens by request id."""
    rows = world.scheduler.schedule(now)
    world.scheduler.take_moves()
    world.scheduler.complete(rows, StepResult([60 if row.samples else None for row in rows]), now)
    world.check()
    for command in world.scheduler.take_commands():
        if isinstance(command, GrantKv) and command.request.state is RequestState.RECEIVING:
            world.arrive(command.request.key[0], now=now)
    return {row.request.key[0]: row.count for row in rows}


def finish(world, limit=500) -> None:
    for _ in range(limit):
        step(world)
        if not len(world.scheduler):
            world.check_all_is_empty()
            return
    raise AssertionError("not done in time")


# --- in the order of arrival


@pytest.mark.parametrize("swap_blocks", [0, 3, 40])
def test_by_arrival_the_oldest_gets_a_token_in_every_step_while_others_come_and_blocks_run_dry(swap_blocks):
    world = Decode(num_blocks=8, block_size=4, swap_blocks=swap_blocks, max_num_seqs=4, max_waiting=50)
    oldest = world.add("oldest", prompt=[1] * 4, max_tokens=24)
    world.arrive("oldest")
    for number in range(22):
        world.add(f"r{number}", prompt=[number] * 5, max_tokens=8, local=number % 2 == 0)
        assert step(world)["oldest"] == 1
    assert world.scheduler.load().num_preemptions > 0
    step(world)
    assert oldest.state is RequestState.ENDED
    finish(world)


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_by_arrival_a_preempted_request_is_back_and_done_while_others_keep_coming(swap_blocks):
    world = Decode(num_blocks=6, block_size=4, swap_blocks=swap_blocks, max_num_seqs=4, max_waiting=500)
    first, second = (world.add(name, prompt=[ord(name)] * 4, max_tokens=12) for name in "ab")
    for name in "ab":
        world.arrive(name)
    for number in range(60):
        world.add(f"r{number}", prompt=[number] * 4, max_tokens=4, local=True)
        step(world)
        if second.state is RequestState.ENDED:
            break
    assert world.scheduler.load().num_preemptions > 0
    assert first.state is second.state is RequestState.ENDED
    assert number < 40
    finish(world)


def test_by_arrival_all_get_their_first_token_in_order():
    world = Decode(num_blocks=16, block_size=4, max_num_seqs=3, max_num_prefill_tokens=4, max_waiting=50)
    lengths = [13, 2, 9, 3, 17, 3, 8, 2]
    for number, num_prompt in enumerate(lengths):
        world.add(f"r{number}", prompt=[number] * num_prompt, max_tokens=2, local=True)
    finish(world)
    spoken = [name for name, start, token_ids, _ in outputs_of(world) if start == 0 and token_ids]
    assert spoken == [f"r{number}" for number in range(len(lengths))]


# --- by priority


def test_by_priority_the_less_important_starves_while_others_come_and_hears_of_it_in_time():
    world = Decode(num_blocks=4, block_size=4, by_priority=True, max_waiting=50, lease=10.0)
    filler = world.add("h0", prompt=[1] * 16, max_tokens=1, priority=1, now=0.0)
    low = world.add("late", prompt=[1] * 16, max_tokens=1, priority=5, now=0.0)
    for number in range(1, 10):
        world.add(f"h{number}", prompt=[1] * 16, max_tokens=1, priority=1, now=float(number))
        world.arrive(f"h{number - 1}", now=float(number))
        world.scheduler.expire(float(number))
        assert low.state is RequestState.OFFERED, "each more important one goes before it"
    assert filler.state is RequestState.ENDED
    world.scheduler.expire(10.5)
    assert ("late", 0, (), EndReason.OVERLOADED) in outputs_of(world)
    world.arrive("h9")
    world.ended("late")
    world.check_all_is_empty()


def test_by_priority_the_less_important_is_served_when_no_more_of_the_others_come():
    world = Decode(num_blocks=4, block_size=4, by_priority=True, max_waiting=50)
    for number in range(5):
        world.add(f"h{number}", prompt=[1] * 16, max_tokens=1, priority=1)
        if number == 0:
            low = world.add("low", prompt=[1] * 16, max_tokens=1, priority=5)
    for number in range(5):
        assert low.state is RequestState.OFFERED
        world.arrive(f"h{number}")
    assert low.state is RequestState.RECEIVING
    world.arrive("low")
    world.check_all_is_empty()


def test_by_priority_equals_go_by_arrival():
    world = Decode(num_blocks=4, block_size=4, by_priority=True, max_waiting=50, max_num_prefill_tokens=16)
    for number in range(6):
        world.add(f"r{number}", prompt=[1] * 12, max_tokens=1, priority=3, local=True)
    finish(world)
    assert [name for name, _, token_ids, _ in outputs_of(world) if token_ids] == [f"r{number}" for number in range(6)]


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_by_priority_who_is_first_gets_a_token_in_every_step(swap_blocks):
    world = Decode(num_blocks=8, block_size=4, swap_blocks=swap_blocks, by_priority=True, max_waiting=50)
    for number in range(3):
        world.add(f"low{number}", prompt=[number] * 4, max_tokens=20, priority=9)
        world.arrive(f"low{number}")
    high = world.add("high", prompt=[7] * 4, max_tokens=20, priority=0)
    world.arrive("high")
    while high.state is not RequestState.ENDED:
        assert step(world)["high"] == 1
    assert world.scheduler.load().num_preemptions > 0
    finish(world)


# --- prompts beside tokens


def test_running_requests_and_local_prompts_both_get_on_in_every_step_and_steps_are_bounded():
    """What a stream waits for its next token is a step, and a step has at most this many tokens."""
    budget, max_seqs = 6, 8
    world = Decode(num_blocks=200, block_size=4, max_num_seqs=max_seqs, max_num_prefill_tokens=budget, max_waiting=200)
    streams = [world.add(f"s{number}", prompt=[number] * 4, max_tokens=60) for number in range(4)]
    for job in streams:
        world.arrive(job.key[0])
    done = 0
    for number in range(50):
        world.add(f"p{number}", prompt=[number] * 23, max_tokens=1, local=True)
        rows = step(world)
        assert all(rows[job.key[0]] == 1 for job in streams), "decode rows come first"
        prompts = sum(count for name, count in rows.items() if name.startswith("p"))
        assert budget <= prompts, "and prompts get on all the same"
        assert sum(rows.values()) <= budget + max_seqs
        done += prompts
    assert done >= 50 * budget
    finish(world)


@pytest.mark.parametrize(("max_partial", "steps"), [(1, 27), (2, 3), (4, 5)])
def test_a_short_prompt_beside_a_long_one_waits_for_its_share_only(max_partial, steps):
    world = Decode(
        num_blocks=64, block_size=4, max_num_prefill_tokens=8, max_num_partial_prefills=max_partial, max_model_len=256
    )
    world.add("long", 200, local=True, max_tokens=1)
    short = world.add("short", 9, local=True, max_tokens=1)
    taken = 0
    while short.state is not RequestState.ENDED:
        taken, rows = taken + 1, step(world)
        assert sum(rows.values()) <= 8 + 1, "the last token of a prompt is a row like any stream's"
    assert taken <= steps
    assert (max_partial == 1) == (taken > 20), "one after another it waits for all of the long one"
    finish(world)


@pytest.mark.parametrize("max_partial", [2, 3])
def test_a_long_prompt_beside_ever_new_short_ones_is_done_in_time(max_partial):
    world = Decode(
        num_blocks=64, block_size=4, max_num_prefill_tokens=9, max_num_partial_prefills=max_partial, max_waiting=500
    )
    long = world.add("long", 60, local=True, max_tokens=1)
    for number in range(200):
        world.add(f"r{number}", 8, local=True, max_tokens=1)
        rows = step(world)
        if long.state is RequestState.ENDED:
            break
        assert rows["long"] >= 9 // max_partial
    assert number < 60 / (9 // max_partial)
    finish(world)


@pytest.mark.parametrize("max_partial", [None, 1, 2])
def test_on_prefill_a_long_prompt_beside_ever_new_short_ones_is_done_in_time(max_partial):
    world = Prefill(
        num_blocks=64,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_partial_prefills=max_partial,
        max_num_seqs=8,
        max_waiting=500,
        max_model_len=256,
    )
    long = world.add("long", 100, target=None, max_tokens=1)
    for number in range(200):
        world.add(f"r{number}", 6, target=None, max_tokens=1)
        rows = world.step()
        if long.state is RequestState.ENDED:
            break
        assert rows["long"][1] - rows["long"][0] >= 2, "a quarter of the step"
    assert number <= 100 / 2
    while world.step():
        pass
    world.check_all_is_empty()


def test_on_prefill_with_one_begun_at_a_time_the_oldest_is_the_next_to_begin():
    """A shorter one has begun before it, and shorter ones keep coming."""
    world = Prefill(
        num_blocks=64,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_partial_prefills=1,
        max_num_seqs=6,
        max_waiting=99,
    )
    begun = world.add("begun", 40, target=None, max_tokens=1)
    assert world.step() == {"begun": (0, 8)}
    oldest_of_the_rest = world.add("next", 60, target=None, max_tokens=1)
    later = world.add("later", 30, target=None, max_tokens=1)
    starts = {}
    for number in range(100):
        world.add(f"r{number}", 3, target=None, max_tokens=1)
        for name, (start, _) in world.step().items():
            starts.setdefault(name, (number, start))
        if later.state is RequestState.ENDED:
            break
    assert begun.state is oldest_of_the_rest.state is later.state is RequestState.ENDED
    assert starts["next"][0] < starts["later"][0]
    while world.step():
        pass
    world.check_all_is_empty()
