"""The prefill scheduler, rule by rule. Every test ends with 'all is empty'."""

import pytest

from engine.request import IllegalMoveError, Request, RequestState
from kvtransfer.codec import MAX_TEXT_CHARS
from kvtransfer.outgoing import TransferEnded, TransferOutcome, TransferTimes
from kvtransfer.request_parts import EndReason, LifetimeEvent
from prefill.scheduler import COMPLETING_SHARE, AbortTransfer, SendFirstToken, share_budget
from tests.kvtransfer.samples import spec
from tests.lifecycle.makers import EOS, Prefill, commands_of, outputs_of


def test_the_life_of_a_request():
    world = Prefill()
    job = world.add(num_prompt=10, now=5.0)
    assert job.state is RequestState.WAITING
    assert commands_of(world) == [], "nothing is offered before it has its blocks"
    assert world.step(now=6.0) == {"r": (0, 8)}
    assert commands_of(world) == [("OpenTransfer", "r")]
    assert job.state is RequestState.RUNNING
    assert world.step(now=7.0, token_id=42) == {"r": (8, 10)}
    assert job.state is RequestState.HANDING_OVER
    assert world.scheduler.take_commands() == [SendFirstToken(("r", 0), 42)]
    [said] = world.scheduler.take_outputs()
    assert (said.gateway, said.output.start, said.output.token_ids, said.output.end) == ("gw", 0, (42,), None)
    assert world.step() == {}
    world.ended(now=9.0)
    assert outputs_of(world) == [("r", 0, (42,), EndReason.HANDED_OVER)]
    assert job.state is RequestState.ENDED
    assert job.readings() == {
        LifetimeEvent.RECEIVED: 0.0,
        LifetimeEvent.SCHEDULED: 1.0,
        LifetimeEvent.FIRST_TOKEN: 2.0,
        LifetimeEvent.ENDED: 4.0,
    }
    assert commands_of(world) == []
    world.check_all_is_empty()


def test_the_moments_of_a_transfer_are_part_of_the_last_word():
    world = Prefill()
    world.add(num_prompt=4)
    world.step()
    world.scheduler.take_outputs()
    times = TransferTimes(ready_at=1.25, started_at=1.0, taken_at=1.75)
    world.scheduler.transfer_ended(TransferEnded(("r", 0), TransferOutcome.DONE, times=times), 9.0)
    [said] = world.scheduler.take_outputs()
    assert said.output.end.reason is EndReason.HANDED_OVER
    moments = (LifetimeEvent.KV_STARTED, LifetimeEvent.KV_READY, LifetimeEvent.KV_TAKEN)
    assert [said.output.events[event] for event in moments] == [1.0, 1.25, 1.75]
    world.check_all_is_empty()


def test_a_resumed_request_is_computed_up_to_its_last_known_token():
    world = Prefill(num_blocks=3, block_size=4)
    job = world.add(num_prompt=6, max_tokens=6, resumed=[20, 21, 22])
    assert world.step() == {"r": (0, 8)}
    assert len(job.block_ids) == 3, "prompt 6 + output 3"
    assert world.step(token_id=23) == {"r": (8, 9)}
    assert outputs_of(world) == [("r", 3, (23,), None)]
    assert world.scheduler.take_commands()[-1] == SendFirstToken(("r", 0), 23)
    world.ended()
    assert outputs_of(world) == [("r", 3, (23,), EndReason.HANDED_OVER)]
    world.check_all_is_empty()


@pytest.mark.parametrize(("sampling", "reason"), [({"max_tokens": 4}, EndReason.LENGTH), ({}, EndReason.STOP)])
def test_the_token_of_a_resumed_request_may_be_its_last(sampling, reason):
    world = Prefill()
    world.add(target=None, resumed=[20, 21, 22], **({"max_tokens": 6, "min_tokens": 4} | sampling))
    world.step(token_id=EOS if reason is EndReason.STOP else 50)
    assert [end for *_, end in outputs_of(world)] == [reason]
    world.check_all_is_empty()


# --- the budget


def running(*lengths, computed=0):
    return [Request(spec(f"r{index}", length), "gw", num_computed=computed) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "budget", "counts"),
    [
        ([], 8, []),
        ([5], 8, [5]),
        ([20], 8, [8]),
        ([3, 3], 8, [3, 3]),
        ([20, 20], 8, [8, 0]),  # equal: the older first
        ([100, 4], 8, [2, 4]),  # a quarter for the oldest, then the shortest, which is not kept waiting for more
        ([100, 1], 8, [3, 1]),  # a step that completes a prompt is filled up to the half
        ([4, 100], 8, [4, 0]),
        ([3, 100], 16, [3, 5]),
        ([3, 13], 16, [3, 13]),  # what can be completed is
        ([3, 16], 16, [3, 13]),  # and so is the next one a step later, if all of it fits a step
        ([3, 17], 16, [3, 5]),
        ([100, 8], 8, [2, 6]),
        ([100, 9, 8], 8, [2, 0, 6]),
        ([100, 1, 1, 1, 1, 1, 1, 1], 8, [2, 1, 1, 1, 1, 1, 1, 0]),
        ([100, 1], 1, [1, 0]),  # a budget of one goes to the oldest: nobody starves
        ([1, 1, 1], 8, [1, 1, 1]),
    ],
)
def test_how_a_budget_is_shared(lengths, budget, counts):
    rows = {row.request.key[0]: row.count for row in share_budget(running(*lengths), budget)}
    assert [rows.get(f"r{index}", 0) for index in range(len(lengths))] == counts
    completes = any(count == length for count, length in zip(counts, lengths, strict=True))
    least = budget // COMPLETING_SHARE if completes else budget
    assert sum(counts) >= min(least, sum(lengths)), "the budget is left while there is work"


def test_rows_start_where_the_last_ones_ended():
    [row] = share_budget(running(10, computed=3), 4)
    assert (row.start, row.stop, row.samples) == (3, 7, False)
    [row] = share_budget(running(10, computed=3), 7)
    assert (row.start, row.stop, row.samples) == (3, 10, True)


def test_a_short_prompt_overtakes_a_long_one():
    world = Prefill(max_num_batched_tokens=8)
    world.add("long", 40)
    world.step()
    world.add("short", 6)
    assert world.step() == {"long": (8, 10), "short": (0, 6)}
    assert outputs_of(world) == [("short", 0, (50,), None)]
    world.ended("short")
    while world.step():
        pass
    world.ended("long")
    world.check_all_is_empty()


def test_a_short_prompt_does_not_wait_for_a_whole_chunk_of_a_long_one():
    """Its step ends after half of the budget; the long one then has all of the budget again."""
    world = Prefill(max_num_batched_tokens=8)
    world.add("long", 40)
    assert world.step() == {"long": (0, 8)}
    world.add("short", 1)
    assert world.step() == {"long": (8, 11), "short": (0, 1)}
    assert world.step() == {"long": (11, 19)}


def test_the_oldest_gets_on_whatever_comes_behind_it():
    world = Prefill(num_blocks=32, max_num_batched_tokens=8, max_num_seqs=8)
    old = world.add("old", 40)
    steps = 0
    while old.state is not RequestState.HANDING_OVER:
        world.add(f"s{steps}", 4, target=None)
        world.add(f"t{steps}", 4, target=None)
        world.step()
        steps += 1
        assert steps <= 20, "starved"
    assert steps == 19, "two tokens a step, and four once it is the shortest"
    world.ended("old")
    while world.step():
        pass
    world.check_all_is_empty()


# --- admission


def test_admission_is_first_come_first_served_and_a_full_pool_stops_it():
    world = Prefill(num_blocks=4, block_size=4)
    first = world.add("first", 12)
    big = world.add("big", 8)
    small = world.add("small", 1)
    world.step()
    assert (first.state, big.state, small.state) == (
        RequestState.RUNNING,
        RequestState.WAITING,
        RequestState.WAITING,  # it would fit, but it is not its turn
    )
    assert (world.scheduler.num_running, world.scheduler.num_waiting, world.pool.num_free) == (1, 2, 1)
    world.step()
    assert world.step() == {}
    world.ended("first")
    assert set(world.step()) == {"big", "small"}
    world.step()
    for request_id in ("big", "small"):
        world.ended(request_id)
    world.check_all_is_empty()


def test_at_most_max_num_seqs_compute_and_those_handing_over_do_not_count():
    world = Prefill(max_num_seqs=2, max_num_batched_tokens=6)
    for request_id in "abc":
        world.add(request_id, 4)
    assert set(world.step()) == {"a", "b"}
    assert set(world.step()) == {"b", "c"}
    world.step()
    for request_id in "abc":
        world.ended(request_id)
    world.check_all_is_empty()


def test_a_full_queue_turns_a_request_away():
    world = Prefill(max_waiting=1)
    world.add("kept")
    world.add("late", now=3.0)
    [said] = world.scheduler.take_outputs()
    assert (said.output.request_id, said.output.token_ids) == ("late", ())
    assert said.output.end.reason is EndReason.OVERLOADED
    assert said.output.end.message == "the queue of this worker is full"
    world.step()
    assert commands_of(world) == [("OpenTransfer", "kept"), ("SendFirstToken", "kept")]
    world.ended("kept")
    world.check_all_is_empty()


def test_a_repeated_request_is_served_once():
    world = Prefill()
    first, again = world.add(), world.add()
    assert world.scheduler.find(("r", 0)) is first
    assert again.events == {}
    assert world.step() == {"r": (0, 4)}
    world.add()
    world.ended()
    assert outputs_of(world) == [("r", 0, (50,), None), ("r", 0, (50,), EndReason.HANDED_OVER)]
    assert commands_of(world) == [("OpenTransfer", "r"), ("SendFirstToken", "r")]
    world.check_all_is_empty()


# --- ends


@pytest.mark.parametrize(
    ("sampling", "token_id", "reason"),
    [
        ({}, EOS, EndReason.STOP),
        ({"stop_token_ids": (9,)}, 9, EndReason.STOP),
        ({"max_tokens": 1}, 50, EndReason.LENGTH),
        ({"max_tokens": 1}, EOS, EndReason.STOP),
    ],
)
def test_a_first_token_that_is_the_last_ends_the_request_here(sampling, token_id, reason):
    world = Prefill()
    job = world.add(**sampling)
    world.step(token_id=token_id)
    assert outputs_of(world) == [("r", 0, (token_id,), reason)]
    assert job.state is RequestState.CLOSING
    [_, abort] = world.scheduler.take_commands()
    assert abort == AbortTransfer(("r", 0), reason.value, tell_peer=False)
    assert world.pool.num_free == 15, "the sender may still read the block"
    world.ended(outcome=TransferOutcome.ABORTED)
    assert outputs_of(world) == []
    world.check_all_is_empty()


def test_eos_goes_on_if_the_request_ignores_it():
    world = Prefill()
    job = world.add(ignore_eos=True)
    world.step(token_id=EOS)
    assert job.state is RequestState.HANDING_OVER
    world.ended()
    world.check_all_is_empty()


def test_without_a_target_the_request_ends_with_its_first_token():
    world = Prefill()
    world.add(target=None)
    world.step()
    assert outputs_of(world) == [("r", 0, (50,), EndReason.LENGTH)]
    assert commands_of(world) == []
    world.check_all_is_empty()


@pytest.mark.parametrize("outcome", [TransferOutcome.REVOKED, TransferOutcome.FAILED, TransferOutcome.ABORTED])
@pytest.mark.parametrize("steps", [1, 2], ids=["running", "handing over"])
def test_a_transfer_that_ends_early_fails_the_request(outcome, steps):
    world = Prefill()
    world.add(num_prompt=10)
    for _ in range(steps):
        world.step()
    world.scheduler.take_outputs()
    world.ended(outcome=outcome, reason="why")
    [said] = world.scheduler.take_outputs()
    assert said.output.end.reason is EndReason.FAILED
    assert said.output.end.message == "the KV transfer ended early: why"
    assert said.output.token_ids == ((50,) if steps == 2 else ())
    assert world.step() == {}
    world.check_all_is_empty()


def test_done_before_it_is_done_is_a_failure():
    world = Prefill()
    world.add(num_prompt=10)
    world.step()
    world.ended(outcome=TransferOutcome.DONE)
    assert outputs_of(world) == [("r", 0, (), EndReason.FAILED)]
    world.check_all_is_empty()


def test_what_a_peer_says_is_cut_to_what_a_message_may_hold():
    world = Prefill()
    world.add()
    world.ended(outcome=TransferOutcome.REVOKED, reason="x" * MAX_TEXT_CHARS)
    [said] = world.scheduler.take_outputs()
    assert len(said.output.end.message) == MAX_TEXT_CHARS
    world.check_all_is_empty()


def test_cancel_while_waiting_frees_the_place_at_once():
    world = Prefill()
    world.add(num_prompt=10)
    world.scheduler.cancel(("r", 0), 3.0)
    assert outputs_of(world) == [("r", 0, (), EndReason.CANCELLED)]
    assert commands_of(world) == [], "decode has heard nothing of it"
    world.check_all_is_empty()


def test_waiting_for_room_is_bounded():
    world = Prefill(num_blocks=4, queue_timeout=10.0)
    world.add("runs", 16)
    world.step()
    waits = world.add("waits", 4, now=2.0)
    world.scheduler.expire(12.0)
    assert waits.state is RequestState.WAITING
    world.scheduler.take_outputs()
    world.scheduler.expire(12.1)
    [said] = world.scheduler.take_outputs()
    assert (said.output.request_id, said.output.end.reason) == ("waits", EndReason.OVERLOADED)
    assert said.output.end.message == "no room in the KV pool for 10 s"
    world.step()
    world.ended("runs")
    world.check_all_is_empty()


@pytest.mark.parametrize("steps", [1, 2], ids=["running", "handing over"])
def test_cancel_in_each_state_waits_for_the_sender(steps):
    world = Prefill()
    job = world.add(num_prompt=10)
    for _ in range(steps):
        world.step()
    world.scheduler.take_outputs()
    world.scheduler.take_commands()
    world.scheduler.cancel(("r", 0), 3.0)
    assert job.state is RequestState.CLOSING
    assert world.scheduler.take_commands() == [AbortTransfer(("r", 0), "cancelled", tell_peer=False)]
    world.scheduler.cancel(("r", 0), 3.0)
    world.scheduler.cancel_all_of("gw", 3.0)
    assert world.step() == {}
    assert [end for *_, end in outputs_of(world)] == [EndReason.CANCELLED]
    assert commands_of(world) == []
    assert world.pool.num_free == 13
    world.ended(outcome=TransferOutcome.ABORTED)
    assert outputs_of(world) == []
    world.check_all_is_empty()


def test_cancel_without_a_target_frees_at_once():
    world = Prefill()
    world.add(num_prompt=10, target=None)
    world.step()
    world.scheduler.cancel(("r", 0), 3.0)
    assert outputs_of(world) == [("r", 0, (), EndReason.CANCELLED)]
    world.check_all_is_empty()


def test_a_gateway_that_is_gone_takes_its_own_requests_with_it():
    world = Prefill()
    world.add("a", gateway="one")
    world.add("b", gateway="other")
    world.add("c", gateway="one", target=None)
    world.scheduler.cancel_all_of("one", 1.0)
    assert [(name, end) for name, _, _, end in outputs_of(world)] == [
        ("a", EndReason.CANCELLED),
        ("c", EndReason.CANCELLED),
    ]
    world.ended("a", TransferOutcome.ABORTED)
    assert set(world.step()) == {"b"}
    world.ended("b")
    world.check_all_is_empty()


def test_how_long_decode_takes_is_not_for_the_scheduler_to_judge():
    world = Prefill()
    job = world.add(now=0.0)
    world.step(now=5.0)
    world.scheduler.expire(1e9)
    assert job.state is RequestState.HANDING_OVER
    world.ended()
    assert job.state is RequestState.ENDED
    world.check_all_is_empty()


def test_events_of_unknown_requests_change_nothing():
    world = Prefill()
    world.ended("nobody")
    world.scheduler.cancel(("nobody", 0), 0.0)
    world.scheduler.expire(1e9)
    assert outputs_of(world) == commands_of(world) == []
    world.check_all_is_empty()


def test_an_illegal_move_raises():
    job = Prefill().add()
    with pytest.raises(IllegalMoveError, match="WAITING -> HANDING_OVER"):
        job.move(RequestState.HANDING_OVER)
