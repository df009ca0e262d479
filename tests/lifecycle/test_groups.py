"""Choices of one prompt: computed once, shipped once, forked with their first tokens, copied where they part."""

import pytest

from engine.block_pool import blocks_for
from engine.request import RequestState, StepResult
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.outgoing import TransferEnded, TransferOutcome, TransferTimes
from kvtransfer.request_parts import Drawn, EndReason, LifetimeEvent
from prefill.scheduler import AbortTransfer, SendFirstToken
from tests.lifecycle.makers import EOS, Decode, Prefill, commands_of, outputs_of, words_of
from tests.lifecycle.paper_pool import PaperPool

THREE = ("r", "r.1", "r.2")


def ends_of(world) -> dict[str, EndReason]:
    return {item.output.request_id: item.output.end.reason for item in words_of(world) if item.output.end}


# --- prefill


def test_a_prompt_is_computed_once_and_each_choice_has_a_first_token():
    world = Prefill(max_num_batched_tokens=6)
    world.add(num_prompt=10, num_siblings=2)
    assert world.scheduler.num_waiting == 3
    assert world.step() == {"r": (0, 6)}
    assert world.scheduler.num_running == 3
    assert world.pool.num_used == blocks_for(10, 4)
    assert world.step(tokens={"r": 50, "r.1": 51, "r.2": 52}) == {"r": (6, 10), "r.1": (10, 10), "r.2": (10, 10)}
    assert outputs_of(world) == [("r", 0, (50,), None), ("r.1", 0, (51,), None), ("r.2", 0, (52,), None)]
    assert world.scheduler.take_commands()[1:] == [
        SendFirstToken(("r", 0), 50, siblings={"r.1": Drawn(51), "r.2": Drawn(52)})
    ]
    world.ended()
    assert ends_of(world) == dict.fromkeys(THREE, EndReason.HANDED_OVER)
    world.check_all_is_empty()


def test_the_transfer_is_told_of_once():
    world = Prefill(max_num_batched_tokens=16)
    world.add(num_siblings=2)
    world.step(tokens={"r": EOS})
    world.scheduler.take_outputs()
    times = TransferTimes(1.5, 1.6, 1.75)
    world.scheduler.transfer_ended(TransferEnded(("r", 0), TransferOutcome.DONE, times=times), 2.0)
    told = [item.output for item in world.scheduler.take_outputs() if LifetimeEvent.KV_TAKEN in item.output.events]
    assert [output.request_id for output in told] == ["r.1"]
    assert told[0].events[LifetimeEvent.SCHEDULED] == 1.0
    world.check_all_is_empty()


def test_a_choice_may_end_with_its_first_token_while_others_go_on():
    for early in THREE:
        world = Prefill(max_num_batched_tokens=16)
        world.add(num_siblings=2)
        world.step(tokens={early: EOS})
        assert ends_of(world) == {early: EndReason.STOP}
        siblings = {name: Drawn(EOS if name == early else 50) for name in THREE[1:]}
        sent = world.scheduler.take_commands()[-1]
        assert sent == SendFirstToken(("r", 0), EOS if early == "r" else 50, siblings=siblings)
        world.ended()
        assert ends_of(world) == {name: EndReason.HANDED_OVER for name in THREE if name != early}
        world.check_all_is_empty()


def test_a_group_that_ends_with_its_first_tokens_is_not_shipped_on():
    world = Prefill(max_num_batched_tokens=16)
    world.add(num_siblings=2, max_tokens=1)
    world.step()
    assert ends_of(world) == dict.fromkeys(THREE, EndReason.LENGTH)
    assert world.scheduler.take_commands()[1:] == [AbortTransfer(("r", 0), "length", tell_peer=False)]
    world.ended(outcome=TransferOutcome.ABORTED)
    world.check_all_is_empty()
    world.add(num_siblings=2, target=None)
    world.step()
    assert ends_of(world) == dict.fromkeys(THREE, EndReason.LENGTH)
    world.check_all_is_empty()


@pytest.mark.parametrize("moment", ["waiting", "computing", "handing over"])
def test_the_leader_may_go_before_the_others(moment):
    world = Prefill(max_num_batched_tokens=6)
    job = world.add(num_prompt=10, num_siblings=2)
    for _ in range(["waiting", "computing", "handing over"].index(moment)):
        world.step()
    world.scheduler.cancel(("r", 0), 1.0)
    world.check()
    assert ends_of(world) == {"r": EndReason.CANCELLED}
    world.scheduler.cancel(("r", 0), 1.0)
    world.step()
    world.step()
    assert job.state is RequestState.HANDING_OVER
    assert commands_of(world) == [("OpenTransfer", "r"), ("SendFirstToken", "r")]
    world.scheduler.cancel(("r.1", 0), 2.0)
    world.ended()
    assert ends_of(world) == {"r.1": EndReason.CANCELLED, "r.2": EndReason.HANDED_OVER}
    world.check_all_is_empty()


@pytest.mark.parametrize("order", [THREE, THREE[::-1]])
def test_the_last_to_leave_ends_the_computation(order):
    world = Prefill(max_num_batched_tokens=6)
    world.add(num_prompt=10, num_siblings=2)
    world.step()
    for name in order:
        assert world.pool.num_used > 0
        world.scheduler.cancel((name, 0), 1.0)
    assert ends_of(world) == dict.fromkeys(THREE, EndReason.CANCELLED)
    assert commands_of(world) == [("OpenTransfer", "r"), ("AbortTransfer", "r")]
    world.ended(outcome=TransferOutcome.ABORTED)
    world.check_all_is_empty()


def test_members_count_as_requests_on_prefill():
    world = Prefill(max_num_seqs=4, max_num_batched_tokens=2)
    world.add("a", num_siblings=2)
    world.add("b", num_siblings=1)
    assert world.step() == {"a": (0, 2)}
    world.scheduler.cancel(("a.1", 0), 1.0)
    world.step()
    assert set(world.step()) == {"b"}


def test_all_of_a_group_are_turned_away_together():
    for world in (Prefill(max_waiting=2), Decode(max_waiting=2)):
        world.add("a", num_siblings=1, **({} if isinstance(world, Prefill) else {"offered": False}))
        world.add("b", num_siblings=1, **({} if isinstance(world, Prefill) else {"offered": False}))
        assert ends_of(world) == dict.fromkeys(("b", "b.1"), EndReason.OVERLOADED)
        world.check()


# --- decode


def test_a_group_arrives_once_and_forks():
    world = Decode()
    job = world.add(num_prompt=6, num_siblings=2)
    assert commands_of(world) == [("ExpectOffer", "r"), ("GrantKv", "r")]
    reserved = [item.output for item in world.scheduler.take_outputs()]
    assert [output.request_id for output in reserved] == list(THREE)
    assert all(LifetimeEvent.RESERVED in output.events for output in reserved)
    world.arrive(sibling_tokens={"r.1": 51, "r.2": 52})
    assert [request.block_ids for request in world.added] == [job.block_ids] * 3
    assert world.pool.num_used == 2
    assert world.step() == list(THREE)
    assert outputs_of(world) == [("r", 0, (50, 60), None), ("r.1", 0, (51, 60), None), ("r.2", 0, (52, 60), None)]
    for name in THREE:
        world.scheduler.cancel((name, 0), 3.0)
        world.check()
    world.check_all_is_empty()


@pytest.mark.parametrize("local", [False, True])
def test_the_last_block_is_copied_by_all_but_the_last_who_writes(local):
    world, tokens = Decode(), {"r": 50, "r.1": 51, "r.2": 52}
    leader = world.add(num_prompt=6, num_siblings=2, local=local)
    if local:
        assert world.step(tokens=tokens) == list(THREE)
    else:
        world.arrive(sibling_tokens={"r.1": 51, "r.2": 52})
    first, last = leader.block_ids
    world.step()
    copies = [request.block_ids[1] for request in world.added[:2]]
    assert world.copies == dict.fromkeys(copies, last)
    assert world.added[2].block_ids == [first, last], "the last owner writes in place"
    assert all(request.block_ids[0] == first for request in world.added)
    assert len({*copies, last}) == 3
    world.step()
    assert world.copies == {}


def test_a_full_last_block_is_shared_for_good():
    world = Decode()
    world.add(num_prompt=8, num_siblings=1)
    world.arrive(sibling_tokens={"r.1": 51})
    world.step()
    assert world.copies == {}
    assert world.added[0].block_ids[:2] == world.added[1].block_ids[:2]
    assert world.pool.num_used == 4


def test_a_copy_gets_the_name_of_what_it_holds():
    """Both choices fill the block in which they parted; each is found by what it generated."""
    world = Decode(share_prefixes=True, max_num_seqs=4)
    world.add(num_prompt=6, num_siblings=1, prompt=[5] * 6, max_tokens=8)
    world.arrive(token_id=50, sibling_tokens={"r.1": 51})
    for _ in range(3):
        world.step(tokens={"r": 60, "r.1": 61})
    for first, second in ((50, 60), (51, 61)):
        follower = world.add(f"s{first}", prompt=[5] * 6 + [first, second, 9], local=True, offered=False)
        assert follower.num_cached == 8
        held = next(
            request for request in world.scheduler._requests.values() if request.output_token_ids[:1] == [first]
        )
        assert follower.block_ids[:2] == held.block_ids[:2]


def test_the_memory_of_eight_choices_is_nearly_that_of_one():
    used = []
    for num_siblings in (0, 7):
        world = Decode(num_blocks=200, block_size=16, max_num_seqs=8, max_model_len=2048, max_waiting=8)
        world.add(num_prompt=1000, num_siblings=num_siblings, max_tokens=100)
        world.arrive(sibling_tokens={f"r.{index}": 50 for index in range(1, 8)})
        world.step()
        used.append(world.pool.num_used)
    assert used == [63, 70]
    assert used[1] < 1.3 * used[0]


def test_shared_blocks_count_once():
    world = Decode(num_blocks=16, block_size=4)
    world.add(num_prompt=5, num_siblings=2)
    world.arrive(sibling_tokens={"r.1": 51, "r.2": 52})
    load = world.scheduler.load()
    assert load.kv_usage == pytest.approx(2 / 16)
    assert load.kv_waste == pytest.approx(2 / 8)
    world.step()
    assert world.scheduler.load().kv_waste == pytest.approx(3 / 16)  # one slot in each of three blocks


def test_a_group_waits_until_all_of_it_may_run():
    world = Decode(max_num_seqs=4)
    world.add("a", max_tokens=2)
    world.add("b", num_siblings=3)
    world.add("c")
    world.arrive("a")
    assert [name for _, name in commands_of(world)] == ["a", "a", "b", "c"]
    world.step()
    assert ends_of(world) == {"a": EndReason.LENGTH}
    assert commands_of(world) == [("GrantKv", "b")]


def test_a_group_larger_than_the_pool_runs_one_behind_the_other():
    """Its prompt takes all of the pool, so its choices lose their blocks to each other, and all end."""
    world, paper = Decode(num_blocks=4, block_size=4), None
    paper = PaperPool(4, world.pool)
    leader = world.add(num_prompt=13, num_siblings=3, max_tokens=3)
    paper.write(leader, 0, 13)
    world.arrive(sibling_tokens={f"r.{index}": 50 + index for index in range(1, 4)})
    for _ in range(200):
        rows = world.scheduler.schedule(2.0)
        if not rows:
            break
        paper.copy(world.scheduler.take_copies())
        for row in rows:
            paper.write(row.request, row.start, row.stop)
        world.scheduler.complete(rows, StepResult([60 if row.samples else None for row in rows]), 2.0)
        world.check()
    assert ends_of(world) == dict.fromkeys((*THREE, "r.3"), EndReason.LENGTH)
    assert world.scheduler.load().num_preemptions > 0
    world.check_all_is_empty()


@pytest.mark.parametrize("moment", ["waiting", "receiving"])
def test_a_leader_that_nobody_waits_for_carries_the_others(moment):
    world = Decode()
    world.add(num_siblings=2, offered=moment == "receiving")
    world.scheduler.cancel(("r", 0), 0.5)
    world.offer()
    world.scheduler.cancel(("r.1", 0), 0.5)
    world.arrive(sibling_tokens={"r.1": 51, "r.2": 52})
    assert world.step() == ["r.2"]
    assert ends_of(world) == dict.fromkeys(("r", "r.1"), EndReason.CANCELLED)
    assert commands_of(world) == [("ExpectOffer", "r"), ("GrantKv", "r")]
    world.scheduler.cancel(("r.2", 0), 2.0)
    world.check_all_is_empty()


def test_a_carrier_draws_and_is_not_heard():
    world = Decode(max_num_prefill_tokens=3)
    world.add(num_siblings=2, local=True)
    world.step()
    world.scheduler.cancel(("r", 0), 1.0)
    world.step()
    assert [item for item in outputs_of(world) if item[0] == "r"] == [("r", 0, (), EndReason.CANCELLED)]
    assert world.step() == ["r.1", "r.2"]


def test_a_group_nobody_waits_for_is_not_taken():
    world = Decode()
    world.add(num_siblings=1)
    for name in ("r", "r.1"):
        world.scheduler.cancel((name, 0), 1.0)
    assert commands_of(world)[-1] == ("CloseReception", "r")
    world.ended(outcome=ReceptionOutcome.CLOSED)
    world.check_all_is_empty()


def test_whoever_has_no_first_token_has_failed():
    world = Decode()
    world.add(num_siblings=2)
    world.arrive(sibling_tokens={"r.2": 52})
    assert ends_of(world) == {"r.1": EndReason.FAILED}
    assert world.step() == ["r", "r.2"]


def test_what_does_not_arrive_fails_for_all():
    world = Decode()
    world.add(num_siblings=2)
    world.scheduler.cancel(("r", 0), 1.0)
    world.ended(outcome=ReceptionOutcome.FAILED)
    assert ends_of(world) == {"r": EndReason.CANCELLED, "r.1": EndReason.FAILED, "r.2": EndReason.FAILED}
    world.check_all_is_empty()


def test_a_first_token_that_ends_a_choice_ends_no_other():
    for early in THREE:
        world = Decode()
        world.add(num_siblings=2)
        tokens = {name: EOS if name == early else 50 for name in THREE}
        world.arrive(token_id=tokens["r"], sibling_tokens={name: tokens[name] for name in THREE[1:]})
        assert ends_of(world) == {early: EndReason.STOP}
        assert world.step() == [name for name in THREE if name != early]
