"""Blocks run dry on decode: who gives its own, who gets on, and that all come to their end with all empty."""

import pytest

from engine.request import RequestState, StepResult
from kvtransfer.request_parts import EndReason
from tests.lifecycle.makers import Decode, outputs_of
from tests.lifecycle.paper_pool import PaperPool


def running(world, *request_ids, num_prompt=4, **sampling):
    """Requests that have their KV and their first token."""
    jobs = [world.add(name, num_prompt, prompt=[ord(name)] * num_prompt, **sampling) for name in request_ids]
    for name in request_ids:
        world.arrive(name)
    world.scheduler.take_outputs()
    return jobs


def tokens_of(world) -> dict:
    said: dict = {}
    for name, start, token_ids, _ in outputs_of(world):
        said.setdefault(name, [])[start:] = token_ids
    return said


def run_to_the_end(world, paper=None, limit=300) -> int:
    """Steps until nothing runs; the token after n others is n. Returns the number of steps."""
    for step in range(limit):
        rows = world.scheduler.schedule(2.0)
        if not rows:
            return step
        if paper is not None:
            for row in rows:
                paper.write(row.request, row.start, row.stop)
        sampled = [100 + len(row.request.output_token_ids) if row.samples else None for row in rows]
        world.scheduler.complete(rows, StepResult(sampled), 2.0)
        world.check()
    raise AssertionError(f"still running after {limit} steps")


def test_a_sequence_takes_a_block_only_when_it_needs_one():
    world = Decode(num_blocks=8, block_size=4)
    [job] = running(world, "a", num_prompt=4, max_tokens=9)
    held = []
    while world.step():
        held.append(len(job.block_ids))
    assert held == [2, 2, 2, 2, 3, 3, 3, 0]
    world.check_all_is_empty()


def test_the_last_in_the_order_gives_its_blocks_to_the_first():
    world = Decode(num_blocks=4, block_size=4)
    first, last = running(world, "a", "b", max_tokens=8)
    assert world.step() == ["a", "b"]
    assert world.pool.num_free == 0
    for _ in range(3):
        world.step()
    assert world.step() == ["a"], "a needs a third block, and gets one of b's"
    assert (first.state, last.state, last.block_ids) == (RequestState.RUNNING, RequestState.PREEMPTED, [])
    assert world.scheduler.load().num_preemptions == 1
    assert world.scheduler.num_waiting == 1
    assert run_to_the_end(world) < 20
    assert {name: len(tokens) for name, tokens in tokens_of(world).items()} == {"a": 8, "b": 8}
    world.check_all_is_empty()


def test_the_last_one_sits_out_rather_than_lose_its_own_blocks_to_itself():
    world = Decode(num_blocks=5, block_size=4)
    _, last = running(world, "a", "b", num_prompt=8, max_tokens=2)
    assert world.step() == ["a"], "one block was left, and a came first"
    assert (last.state, len(last.block_ids)) == (RequestState.RUNNING, 2)
    assert world.step() == ["b"]
    world.check_all_is_empty()


def test_what_was_preempted_is_computed_again_in_chunks_beside_the_others():
    world = Decode(num_blocks=8, block_size=4, max_num_prefill_tokens=3, max_num_seqs=3)
    a, b, c = running(world, "a", "b", "c", num_prompt=8, max_tokens=12)
    while c.state is RequestState.RUNNING:
        world.step()
    world.scheduler.cancel(b.key, 3.0)
    rows = world.scheduler.schedule(3.0)
    assert [(row.request.key[0], row.count) for row in rows] == [("a", 1), ("c", 3)]
    assert c.num_tokens > 8, "what it had generated is computed again too"
    world.scheduler.complete(rows, StepResult([60, None]), 3.0)
    assert run_to_the_end(world) < 40
    assert a.state is c.state is RequestState.ENDED
    world.check_all_is_empty()


def test_nothing_new_comes_in_before_what_was_preempted():
    world = Decode(num_blocks=4, block_size=4)
    a, b = running(world, "a", "b", max_tokens=8)
    while b.state is RequestState.RUNNING:
        world.step()
    new = world.add("new", 1, max_tokens=1)
    assert new.state is RequestState.OFFERED
    world.scheduler.cancel(a.key, 3.0)
    assert new.state is RequestState.OFFERED, "b comes first"
    world.step()
    assert b.state is RequestState.RUNNING
    run_to_the_end(world)
    assert new.state is RequestState.RECEIVING
    world.arrive("new")
    world.check_all_is_empty()


def test_a_preempted_request_can_be_cancelled():
    world = Decode(num_blocks=4, block_size=4)
    _, last = running(world, "a", "b", max_tokens=8)
    while last.state is RequestState.RUNNING:
        world.step()
    world.scheduler.take_outputs()
    world.scheduler.cancel(last.key, 3.0)
    assert [(name, end) for name, _, _, end in outputs_of(world)] == [("b", EndReason.CANCELLED)]
    run_to_the_end(world)
    world.check_all_is_empty()


def test_by_priority_the_least_important_gives_its_blocks():
    world = Decode(num_blocks=4, block_size=4, by_priority=True)
    low = world.add("l", prompt=[1] * 4, max_tokens=8, priority=5)
    high = world.add("h", prompt=[2] * 4, max_tokens=8, priority=1)
    for name in "lh":
        world.arrive(name)
    while RequestState.PREEMPTED not in (low.state, high.state):
        world.step()
    assert (low.state, high.state) == (RequestState.PREEMPTED, RequestState.RUNNING)
    run_to_the_end(world)
    world.check_all_is_empty()


@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("num_blocks", [6, 9, 40])
def test_all_come_to_their_end_with_the_tokens_of_an_undisturbed_run(num_blocks, share_prefixes):
    """40 blocks hold all of them, 6 just the longest one."""
    world = Decode(num_blocks, block_size=4, max_num_seqs=5, share_prefixes=share_prefixes)
    paper = PaperPool(4)
    jobs = [world.add(name, prompt=[n % 2] * (3 + n), max_tokens=12 + n) for n, name in enumerate("abcde")]
    for _ in range(20):
        for job in [job for job in jobs if job.state is RequestState.RECEIVING]:
            paper.write(job, job.num_cached, job.num_prefill)
            world.arrive(job.key[0], token_id=100)
        run_to_the_end(world, paper, limit=100)
    assert [job.output_token_ids for job in jobs] == [[100 + i for i in range(12 + n)] for n in range(5)]
    assert (world.scheduler.load().num_preemptions == 0) == (num_blocks == 40)
    world.check_all_is_empty()
