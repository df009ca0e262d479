"""What blocks hold no token: little, as a request takes one when it needs one.

Half a block a request is empty on average, so a pool wastes about block_size / 2 of a request's mean length. One that
reserved for the longest possible output would waste most of it.
"""

import random
from statistics import mean

import pytest

from engine.request import RequestState, StepResult
from kvtransfer.request_parts import EndReason
from tests.lifecycle.makers import Decode, Prefill

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS, NUM_REQUESTS = 16, 600, 32, 160
MOST_WASTE = 0.04


def lengths(dice: random.Random) -> tuple[int, int]:
    """Tokens of a prompt and of its answer: short questions, chats and documents. Mean prompt about 480 tokens, median
    290, from 16 to 4096; mean answer about 130 tokens, from 8 to 512, and max_tokens is always 512."""
    prompt = min(4096, max(16, int(dice.lognormvariate(5.67, 1.0))))
    return prompt, min(512, max(8, int(dice.expovariate(1 / 130))))


def serve(world, dice: random.Random, local: bool) -> tuple[list[float], int]:
    """Runs the load, a request every other step: the waste after each step with over half of the pool in use, and the
    number of preemptions."""
    jobs, stops, waste = [], {}, []
    for _ in range(20000):
        if len(jobs) < NUM_REQUESTS and dice.random() < 0.5:
            prompt, stops[f"r{len(jobs)}"] = lengths(dice)
            tokens = [dice.randrange(50000) for _ in range(prompt)]
            jobs.append(world.add(f"r{len(jobs)}", prompt=tokens, max_tokens=512, local=local))
        for job in jobs:
            if job.state is RequestState.RECEIVING:
                world.arrive(job.key[0])
        rows = world.scheduler.schedule(2.0)
        sampled = [_token(row, stops) if row.samples else None for row in rows]
        world.scheduler.complete(rows, StepResult(sampled), 2.0)
        world.scheduler.take_moves()
        load = world.scheduler.load()
        if load.kv_usage > 0.5:
            waste.append(load.kv_waste)
        if len(jobs) == NUM_REQUESTS and not len(world.scheduler):
            return waste, load.num_preemptions
    raise AssertionError("not done in time")


def _token(row, stops) -> int:
    job = row.request
    return 1 if len(job.output_token_ids) + 1 >= stops[job.key[0]] else 100


@pytest.mark.parametrize("swap_blocks", [0, 4000])
@pytest.mark.parametrize("local", [False, True])
def test_a_mixed_load_at_block_size_16_wastes_under_four_percent(local, swap_blocks):
    world = Decode(
        NUM_BLOCKS,
        BLOCK_SIZE,
        swap_blocks=swap_blocks,
        max_num_seqs=MAX_SEQS,
        max_num_prefill_tokens=1024,
        max_model_len=8192,
        max_waiting=NUM_REQUESTS,
        lease=1e9,
        share_prefixes=True,
    )
    waste, num_preemptions = serve(world, random.Random(local), local)
    print(f"mean {mean(waste):.4f}, most {max(waste):.4f} of {len(waste)} steps, {num_preemptions} preemptions")
    assert len(waste) > 200
    assert 0.0 < mean(waste) <= max(waste) < MOST_WASTE
    assert num_preemptions > 0, "the pool was never full"
    world.check_all_is_empty()


def test_the_same_load_wastes_more_in_larger_blocks():
    """The negative control: the figure follows the block size."""
    world = Decode(
        NUM_BLOCKS * BLOCK_SIZE // 256,
        256,
        max_num_seqs=MAX_SEQS,
        max_model_len=8192,
        max_waiting=NUM_REQUESTS,
        lease=1e9,
    )
    waste, _ = serve(world, random.Random(0), local=False)
    assert min(waste) > MOST_WASTE


def test_what_is_going_to_be_computed_again_is_no_waste():
    world = Decode(num_blocks=8, block_size=4, max_num_prefill_tokens=2)
    old = world.add("a", prompt=[1] * 4, max_tokens=24)
    new = world.add("b", prompt=[2] * 4, max_tokens=20)
    for name in "ab":
        world.arrive(name)
    while new.state is RequestState.RUNNING:
        world.step()
    assert new.num_tokens > 8
    world.scheduler.cancel(old.key, 2.0)
    world.step()
    assert new.num_computed == 2
    assert world.scheduler.load().kv_waste <= 3 / (len(new.block_ids) * 4), "less than one block"
    world.scheduler.cancel(new.key, 2.0)
    world.check_all_is_empty()


def test_a_prompt_that_prefill_holds_wastes_the_rest_of_its_last_block():
    world = Prefill(num_blocks=16, block_size=16, max_num_batched_tokens=64)
    world.add("r", 33)
    assert world.step() == {"r": (0, 33)}
    assert world.scheduler.load().kv_waste == 15 / 48
    world.ended("r")
    assert world.scheduler.take_outputs()[-1].output.end.reason is EndReason.HANDED_OVER
    world.check_all_is_empty()
