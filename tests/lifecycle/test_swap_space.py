"""Preempted requests leave their KV in the host's memory: who has room there, what comes back, and all is empty."""

import pytest

from engine.block_moves import BlockMove, Route
from engine.request import RequestState, StepResult
from engine.swap_space import SwapSpace
from tests.lifecycle.makers import Decode
from tests.lifecycle.paper_pool import PaperPool

A, B = ("a", 0), ("b", 0)


def out(*pairs):
    return [BlockMove(Route.OUT, *pair) for pair in pairs]


def back(*pairs):
    return [BlockMove(Route.IN, *pair) for pair in pairs]


# --- the books


def test_what_is_saved_comes_back_in_its_order():
    space = SwapSpace(4, block_size=4)
    assert space.save(A, [9, 7, 5], num_tokens=9) == out((9, 0), (7, 1), (5, 2))
    assert (space.load().num_free, space.load().num_out) == (1, 3)
    assert space.restore(A, [1, 3, 2], num_present=0) == (9, back((0, 1), (1, 3), (2, 2)))
    assert (space.load().num_free, space.load().num_in) == (4, 3)
    space.check_integrity([])


def test_blocks_that_hold_nothing_yet_are_not_saved():
    assert SwapSpace(4, 4).save(A, [9, 7, 5], num_tokens=4) == out((9, 0))


@pytest.mark.parametrize(
    ("num_present", "num_tokens", "moves"), [(4, 9, back((1, 3), (2, 2))), (8, 9, back((2, 2))), (12, 12, [])]
)
def test_what_the_prefix_cache_has_is_not_copied(num_present, num_tokens, moves):
    space = SwapSpace(4, 4)
    space.save(A, [9, 7, 5], num_tokens=9)
    assert space.restore(A, [1, 3, 2], num_present) == (num_tokens, moves)
    space.check_integrity([])


def test_all_or_nothing():
    space = SwapSpace(4, 4)
    space.save(A, [9, 7, 5], num_tokens=12)
    assert space.save(B, [1, 2], num_tokens=5) == []
    assert (space.load().num_free, space.load().num_refused) == (1, 1)
    assert space.restore(B, [3, 4], num_present=4) == (4, []), "nothing of it is here"
    space.check_integrity([A])


def test_what_is_dropped_leaves_its_blocks():
    space = SwapSpace(4, 4)
    space.save(A, [9, 7, 5], num_tokens=12)
    space.drop(A)
    space.drop(B)
    assert space.load().num_free == 4
    space.check_integrity([])


def test_kv_of_one_that_is_not_preempted_is_our_own_bug():
    space = SwapSpace(4, 4)
    space.save(A, [9], num_tokens=4)
    with pytest.raises(AssertionError, match="who have blocks of their own"):
        space.check_integrity([B])


# --- in the scheduler


def two_running(swap_blocks, **more):
    """A pool of four blocks, and two requests that grow to three each; what their blocks hold is on paper."""
    world, paper = Decode(num_blocks=4, block_size=4, swap_blocks=swap_blocks, **more), PaperPool(4)
    jobs = [world.add(name, prompt=[ord(name)] * 4, max_tokens=8) for name in "ab"]
    for job in jobs:
        paper.write(job, 0, 4)
        world.arrive(job.key[0], token_id=100)
    return world, paper, *jobs


def step(world, paper):
    """One step; what has been moved before it."""
    rows = world.scheduler.schedule(2.0)
    moves = world.scheduler.take_moves()
    paper.carry_out(moves)
    for row in rows:
        paper.write(row.request, row.start, row.stop)
    sampled = [100 + len(row.request.output_token_ids) if row.samples else None for row in rows]
    world.scheduler.complete(rows, StepResult(sampled), 2)
    world.check()
    return moves, {row.request.key[0]: row.count for row in rows}


def until_preempted(world, paper, job):
    for _ in range(20):
        moves, rows = step(world, paper)
        if job.state is RequestState.PREEMPTED:
            return moves, rows
    raise AssertionError("nobody was preempted")


def test_the_kv_goes_out_before_its_blocks_are_anothers_and_in_before_it_is_read():
    world, paper, a, b = two_running(swap_blocks=4)
    moves, rows = until_preempted(world, paper, b)
    assert [move.route for move in moves] == [Route.OUT] * 2
    assert {move.source for move in moves} & set(a.block_ids), "taken at once"
    assert rows == {"a": 1}
    load = world.scheduler.load()
    assert (load.swap.num_blocks, load.swap.num_free, load.swap.num_out) == (4, 2, 2)
    while not b.block_ids:
        moves, rows = step(world, paper)
    assert [move.route for move in moves] == [Route.IN] * 2
    assert rows == {"b": 1}, "nothing is computed again"
    load = world.scheduler.load()
    assert (load.swap.num_free, load.swap.num_in, load.swap.num_refused) == (4, 2, 0)
    while b.state is RequestState.RUNNING:
        step(world, paper)
    assert a.output_token_ids == b.output_token_ids == [100 + number for number in range(8)]
    world.check_all_is_empty()


def test_without_room_on_the_host_it_is_computed_again():
    world, paper, _, b = two_running(swap_blocks=1)
    moves, _ = until_preempted(world, paper, b)
    assert moves == []
    assert world.scheduler.load().swap.num_refused == 1
    while not b.block_ids:
        _, rows = step(world, paper)
    assert rows["b"] > 4, "all of its tokens"
    while b.state is RequestState.RUNNING:
        step(world, paper)
    assert b.output_token_ids == [100 + number for number in range(8)]
    world.check_all_is_empty()


def test_a_cancelled_request_leaves_nothing_on_the_host():
    world, paper, a, b = two_running(swap_blocks=4)
    until_preempted(world, paper, b)
    world.scheduler.cancel(b.key, 3.0)
    assert world.swap.load().num_free == 4
    world.scheduler.cancel(a.key, 3.0)
    world.check_all_is_empty()


def test_the_loss_of_a_gateway_leaves_nothing_on_the_host():
    world, paper, _, b = two_running(swap_blocks=4)
    until_preempted(world, paper, b)
    world.scheduler.cancel_all_of("gw", 3.0)
    world.check_all_is_empty()


def test_a_prompt_that_was_half_computed_goes_on_from_there():
    world, paper = Decode(num_blocks=8, block_size=4, swap_blocks=8, max_num_prefill_tokens=2), PaperPool(4)
    old = world.add("old", prompt=[1, 2, 3, 4], max_tokens=24)
    paper.write(old, 0, 4)
    world.arrive("old", token_id=100)
    new = world.add("new", prompt=range(40, 60), local=True, max_tokens=2)
    until_preempted(world, paper, new)
    saved = world.scheduler.load().swap.num_out * 4
    assert 0 < saved < 20
    while not new.block_ids:
        step(world, paper)
    assert new.num_computed >= saved
    for _ in range(40):
        step(world, paper)
    assert (len(old.output_token_ids), len(new.output_token_ids)) == (24, 2)
    world.check_all_is_empty()


def test_blocks_that_others_share_are_saved_too_and_shared_again_when_it_comes_back():
    world, paper = Decode(num_blocks=5, block_size=4, swap_blocks=8, share_prefixes=True), PaperPool(4)
    prompt = list(range(20, 28))
    jobs = []
    for name, more in (("a", [30]), ("b", [31])):
        job = world.add(name, prompt=[*prompt, *more], max_tokens=12)
        paper.write(job, job.num_cached, job.num_prefill)
        world.arrive(name, token_id=100)
        jobs.append(job)
    a, b = jobs
    assert a.block_ids[:2] == b.block_ids[:2]
    moves, _ = until_preempted(world, paper, b)
    assert [move.source for move in moves][:2] == a.block_ids[:2]
    while not b.block_ids:
        moves, rows = step(world, paper)
    assert len(moves) < world.scheduler.load().swap.num_out, "what the prefix cache has is not copied"
    assert rows["b"] == 1
    while world.scheduler.num_running:
        step(world, paper)
    world.check_all_is_empty()
