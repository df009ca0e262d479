"""Blocks that a transfer reads or writes are nobody else's until it has ended: not for others' growth, not for the
cache, not when their request is over. And what can never fit is never let in, while all that can comes to its end.
"""

import pytest

from engine.admission import check_spec
from engine.block_moves import Route
from engine.errors import RejectedError
from engine.request import RequestState, StepResult
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.outgoing import TransferOutcome
from tests.kvtransfer.samples import spec
from tests.lifecycle.makers import EOS, TARGET, Decode, Prefill
from tests.lifecycle.paper_pool import PaperPool

PROMPT = list(range(20, 33))  # 13 tokens: four blocks of four


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_prefill_keeps_what_the_sender_reads_while_others_want_room(is_cancelled):
    world, paper = Prefill(num_blocks=7, block_size=4, share_prefixes=True, max_num_batched_tokens=64), PaperPool(4)
    lent = world.add("lent", prompt=PROMPT)
    assert world.step() == {"lent": (0, 13)}
    paper.write(lent, 0, 13)
    if is_cancelled:
        world.scheduler.cancel(lent.key, 1.0)
    held = list(lent.block_ids)
    assert (len(held), lent.lent) == (4, True)
    for number in range(12):
        other = world.add(f"r{number}", prompt=[number] * (4 + number % 9), target=None, max_tokens=1)
        assert not set(held) & set(other.block_ids)
        while other.state is RequestState.RUNNING or world.scheduler._waiting:
            rows = world.scheduler.schedule(2.0)
            for row in rows:
                assert not set(held) & set(row.request.block_ids)
                paper.write(row.request, row.start, row.stop)
            world.scheduler.complete(rows, StepResult([50 if row.samples else None for row in rows]), 2.0)
            world.check()
    assert world.pool.counts.num_evicted > 0, "the cache has had to make room"
    assert lent.block_ids == held
    paper.check(lent, 13)
    too_large = world.add("too large for what is left", prompt=[1] * 16, target=TARGET)
    world.step()
    assert too_large.state is RequestState.WAITING, "and waits for it"
    world.ended("lent")
    world.step()
    assert too_large.block_ids
    world.ended("too large for what is left", TransferOutcome.FAILED)
    world.check_all_is_empty()


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("swap_blocks", [0, 20])
def test_decode_keeps_what_the_receiver_writes_while_others_grow(swap_blocks, is_cancelled):
    """It stands last in the order, and is not preempted all the same: its blocks can't be taken."""
    world = Decode(num_blocks=8, block_size=4, swap_blocks=swap_blocks, share_prefixes=True)
    first, second = (world.add(name, prompt=[ord(name)] * 4, max_tokens=13) for name in "ab")
    for name in "ab":
        world.arrive(name)
    lent = world.add("lent", prompt=PROMPT[:8], max_tokens=2)
    assert lent.state is RequestState.RECEIVING
    held = list(lent.block_ids)
    if is_cancelled:
        world.scheduler.cancel(lent.key, 1.0)
    moved = set()
    for _ in range(40):
        rows = world.scheduler.schedule(2.0)
        for move in world.scheduler.take_moves():
            moved.add(move.source if move.route is Route.OUT else move.target)
        world.scheduler.complete(rows, StepResult([60 if row.samples else None for row in rows]), 2.0)
        world.check()
        assert not set(held) & {block for job in (first, second) for block in job.block_ids}
    assert world.scheduler.load().num_preemptions > 0, "the pool was full"
    assert not set(held) & moved
    assert first.state is second.state is RequestState.ENDED
    assert lent.block_ids == held
    world.ended("lent", ReceptionOutcome.CLOSED)
    world.check_all_is_empty()


@pytest.mark.parametrize("swap_blocks", [0, 2, 20])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(1, 20), (4, 17), (15, 6), (19, 2), (20, 1)])
def test_what_is_let_in_comes_to_its_end_and_one_token_more_is_refused(num_prompt, max_tokens, local, swap_blocks):
    """A pool of 20 tokens; the last output token is never stored."""
    limits = {"vocab_size": 1000, "max_model_len": 64, "pool_tokens": 20}
    check_spec(spec("r", num_prompt, max_tokens=max_tokens), **limits)
    with pytest.raises(RejectedError, match="all of it holds 20"):
        check_spec(spec("r", num_prompt, max_tokens=max_tokens + 1), **limits)
    world = Decode(num_blocks=5, block_size=4, swap_blocks=swap_blocks)
    world.add("old", 8, max_tokens=9)
    world.arrive("old")
    job = world.add("r", num_prompt, max_tokens=max_tokens, local=local)
    for _ in range(100):
        if job.state is RequestState.RECEIVING:
            world.arrive("r")
        world.step()
        world.scheduler.take_moves()
    assert len(job.output_token_ids) == max_tokens
    assert EOS not in job.output_token_ids
    world.check_all_is_empty()
