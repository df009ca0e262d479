"""The decode scheduler, rule by rule. Every test ends with 'all is empty'."""

import pytest

from decode.scheduler import CloseReception
from engine.request import IllegalMoveError, RequestState, StepResult
from kvtransfer.codec import MAX_TEXT_CHARS
from kvtransfer.incoming import ReceptionEnded, ReceptionOutcome
from kvtransfer.request_parts import EndReason, LifetimeEvent
from tests.lifecycle.makers import EOS, Decode, commands_of, outputs_of, words_of


def test_the_life_of_a_request():
    world = Decode()
    job = world.add(num_prompt=5, max_tokens=3, now=10.0)
    assert job.state is RequestState.RECEIVING
    assert commands_of(world) == [("ExpectOffer", "r"), ("GrantKv", "r")]
    assert len(job.block_ids) == 2, "room for the prompt of 5"
    [notice] = world.scheduler.take_outputs()
    assert (notice.gateway, notice.output.start, notice.output.token_ids, notice.output.end) == ("gw", 0, (), None)
    at_once = dict.fromkeys((LifetimeEvent.RECEIVED, LifetimeEvent.OFFERED, LifetimeEvent.RESERVED), 0.0)
    assert notice.output.events == at_once
    assert world.step() == []
    event = ReceptionEnded(("r", 0), ReceptionOutcome.ARRIVED, 40, first_frame_at=11.0)
    world.scheduler.reception_ended(event, 12.0)
    assert job.state is RequestState.RUNNING
    assert outputs_of(world) == []
    [row] = world.scheduler.schedule(13.0)
    assert (row.start, row.count, row.request.token_slice(row.start, row.stop)) == (5, 1, [40])
    world.scheduler.complete([row], StepResult([41]), 14.0)
    assert outputs_of(world) == [("r", 0, (40, 41), None)]
    assert world.step(now=15.0, token_id=42) == ["r"]
    [said] = words_of(world)
    assert (said.gateway, said.output.start, said.output.token_ids) == ("gw", 2, (42,))
    assert said.output.end.reason is EndReason.LENGTH
    assert said.output.events == {
        **at_once,
        LifetimeEvent.FIRST_FRAME: 1.0,
        LifetimeEvent.SPLICED: 2.0,
        LifetimeEvent.RUNNING: 3.0,
        LifetimeEvent.ENDED: 5.0,
    }
    assert commands_of(world) == []
    world.check_all_is_empty()


def test_all_running_requests_take_part_in_every_step_and_a_new_one_joins():
    world = Decode()
    world.add("a")
    world.add("b")
    world.arrive("b")
    assert world.step() == ["b"]
    world.arrive("a")
    assert world.step() == ["a", "b"], "in the order in which they came"
    assert world.step() == ["a", "b"]
    assert world.step() == ["a"]
    world.check_all_is_empty()


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({}, [50, EOS], EndReason.STOP),
        ({"stop_token_ids": (7,)}, [50, 7], EndReason.STOP),
        ({"max_tokens": 2}, [50, 51], EndReason.LENGTH),
        ({"max_tokens": 2}, [50, EOS], EndReason.STOP),
        ({"ignore_eos": True, "max_tokens": 3}, [50, EOS, EOS], EndReason.LENGTH),
        ({"min_tokens": 3, "max_tokens": 5}, [50, EOS, EOS], EndReason.STOP),
        ({"max_tokens": 1}, [50], EndReason.LENGTH),
        ({}, [EOS], EndReason.STOP),
    ],
)
def test_stop_rules(sampling, tokens, reason):
    world = Decode()
    world.add(**sampling)
    world.arrive(token_id=tokens[0])
    for token_id in tokens[1:]:
        world.step(token_id=token_id)
    said = outputs_of(world)
    assert [token for _, _, token_ids, _ in said for token in token_ids] == tokens
    assert [end for *_, end in said if end] == [reason]
    world.check_all_is_empty()


def test_the_models_length_ends_a_request():
    world = Decode(max_model_len=6)
    world.add(num_prompt=4, max_tokens=4)
    world.arrive()
    world.step()
    assert outputs_of(world)[-1][-1] is EndReason.LENGTH
    world.check_all_is_empty()


def test_a_resumed_request_goes_on_behind_what_it_has():
    """Prefill brings the KV of prompt 4 and output 3; what is sampled next is output token 3, the fourth."""
    world = Decode()
    job = world.add(max_tokens=6, resumed=[20, 21, 22])
    assert len(job.block_ids) == 2, "room for what prefill brings: prompt 4 and output 3"
    world.arrive(token_id=23)
    [row] = world.scheduler.schedule(2.0)
    assert (row.start, row.count, row.request.token_slice(0, row.stop)) == (7, 1, [10, 11, 12, 13, 20, 21, 22, 23])
    world.scheduler.complete([row], StepResult([24]), 2.0)
    assert outputs_of(world) == [("r", 3, (23, 24), None)]
    world.step(token_id=25)
    assert outputs_of(world) == [("r", 5, (25,), EndReason.LENGTH)]
    world.check_all_is_empty()


def test_stop_rules_count_the_output_of_earlier_attempts():
    world = Decode()
    world.add(max_tokens=8, min_tokens=4, resumed=[20, 21])
    world.arrive(token_id=EOS)
    world.step(token_id=EOS)
    assert outputs_of(world) == [("r", 2, (EOS, EOS), EndReason.STOP)]
    world.check_all_is_empty()


# --- room


def test_nothing_is_reserved_for_what_prefill_has_not_admitted():
    world = Decode(num_blocks=4, block_size=4)
    early = world.add("early", 16, max_tokens=1, offered=False)
    late = world.add("late", 16, max_tokens=1, offered=False)
    assert (early.state, world.pool.num_free) == (RequestState.WAITING, 4)
    world.offer("late", 1.0)
    assert (early.state, late.state) == (RequestState.WAITING, RequestState.RECEIVING)
    world.offer("late", 2.0)
    world.offer("early", 3.0)
    assert early.state is RequestState.OFFERED
    assert [name for name in commands_of(world) if name[0] == "GrantKv"] == [("GrantKv", "late")]
    world.arrive("late")
    assert early.state is RequestState.RECEIVING
    world.arrive("early")
    world.check_all_is_empty()


def test_waiting_for_an_offer_is_bounded():
    world = Decode(lease=10.0, offer_timeout=100.0)
    world.add(now=1.0, offered=False)
    world.scheduler.expire(101.0)
    assert outputs_of(world) == []
    world.scheduler.expire(101.1)
    [said] = world.scheduler.take_outputs()
    assert said.output.end.reason is EndReason.FAILED
    assert said.output.end.message == "the prefill worker has not offered the KV for 100 s"
    assert commands_of(world) == [("ExpectOffer", "r"), ("CloseReception", "r")]
    world.ended()
    world.check_all_is_empty()


def test_the_lease_counts_from_the_offer():
    world = Decode(max_num_seqs=1, lease=10.0)
    world.add("runs")
    world.add("waits", now=0.0, offered=False)
    world.offer("waits", 50.0)
    world.scheduler.expire(60.0)
    assert outputs_of(world) == []
    world.scheduler.expire(60.1)
    assert outputs_of(world) == [("waits", 0, (), EndReason.OVERLOADED)]
    world.offer("waits", 61.0)
    world.ended("waits")
    world.arrive("runs", token_id=EOS)
    world.check_all_is_empty()


def test_reservation_is_first_come_first_served_and_bounded_by_the_pool():
    world = Decode(num_blocks=4, block_size=4)
    first = world.add("first", 12, max_tokens=1)
    big = world.add("big", 8, max_tokens=1)
    small = world.add("small", 1, max_tokens=1)
    assert (first.state, big.state, small.state) == (
        RequestState.RECEIVING,
        RequestState.OFFERED,
        RequestState.OFFERED,  # it would fit, but it is not its turn
    )
    assert (world.scheduler.num_running, world.scheduler.num_waiting, world.pool.num_free) == (1, 2, 1)
    assert ("GrantKv", "first") in (said := commands_of(world))
    assert [name for name, _ in said] == ["ExpectOffer", "GrantKv", "ExpectOffer", "ExpectOffer"]
    world.arrive("first", token_id=EOS, now=4.0)
    assert commands_of(world) == [("GrantKv", "big"), ("GrantKv", "small")]
    assert big.events[LifetimeEvent.RESERVED] == 4.0
    for request_id in ("big", "small"):
        world.arrive(request_id)
    world.check_all_is_empty()


def test_at_most_max_num_seqs_hold_blocks():
    world = Decode(max_num_seqs=2)
    jobs = [world.add(request_id) for request_id in "abc"]
    assert [job.state for job in jobs] == [RequestState.RECEIVING] * 2 + [RequestState.OFFERED]
    assert [said.output.request_id for said in world.scheduler.take_outputs()] == ["a", "b"]
    world.arrive("a", token_id=EOS)
    assert jobs[2].state is RequestState.RECEIVING
    assert [said.output.request_id for said in world.scheduler.take_outputs()] == ["a", "c"]
    for request_id in "bc":
        world.arrive(request_id, token_id=EOS)
    world.check_all_is_empty()


def test_a_full_queue_turns_a_request_away():
    world = Decode(max_num_seqs=1, max_waiting=1)
    for request_id in ("runs", "waits", "late"):
        world.add(request_id)
    [said] = words_of(world)
    assert said.output.request_id == "late"
    assert said.output.end.reason is EndReason.OVERLOADED
    assert said.output.end.message == "the queue of this worker is full"
    for request_id in ("runs", "waits"):
        world.arrive(request_id, token_id=EOS)
    world.check_all_is_empty()


def test_waiting_for_room_is_bounded_by_the_lease():
    world = Decode(max_num_seqs=1, lease=10.0)
    world.add("runs", now=0.0)
    world.add("waits", now=1.0)
    world.scheduler.expire(11.0)
    assert outputs_of(world) == []
    world.scheduler.expire(11.1)
    [said] = words_of(world)
    assert (said.output.request_id, said.output.end.reason) == ("waits", EndReason.OVERLOADED)
    assert said.output.end.message == "no room in the KV pool for 10 s"
    world.ended("waits")
    world.arrive("runs", token_id=EOS)
    world.check_all_is_empty()


def test_what_gets_room_by_the_end_of_another_does_not_expire_with_it():
    world = Decode(num_blocks=5, block_size=4, lease=10.0)
    world.add("runs", 12, max_tokens=1)
    world.add("big", 16, max_tokens=1)
    small = world.add("small", 1, max_tokens=1)
    world.scheduler.expire(10.5)
    world.ended("big")
    assert outputs_of(world) == [("big", 0, (), EndReason.OVERLOADED)]
    assert small.state is RequestState.RECEIVING
    for request_id in ("runs", "small"):
        world.arrive(request_id)
    world.check_all_is_empty()


def test_a_repeated_request_is_served_once():
    world = Decode()
    first, _ = world.add(), world.add()
    assert world.scheduler.find(("r", 0)) is first
    assert commands_of(world) == [("ExpectOffer", "r"), ("GrantKv", "r")]
    world.arrive(token_id=EOS)
    assert outputs_of(world) == [("r", 0, (EOS,), EndReason.STOP)]
    world.check_all_is_empty()


# --- ends


@pytest.mark.parametrize("outcome", [ReceptionOutcome.ABORTED, ReceptionOutcome.FAILED, ReceptionOutcome.CLOSED])
def test_kv_that_does_not_arrive_fails_the_request(outcome):
    world = Decode()
    world.add()
    world.ended(outcome=outcome, reason="why")
    [said] = words_of(world)
    assert (said.output.token_ids, said.output.end.reason) == ((), EndReason.FAILED)
    assert said.output.end.message == "the KV did not arrive: why"
    assert world.step() == []
    world.check_all_is_empty()


def test_what_a_peer_says_is_cut_to_what_a_message_may_hold():
    world = Decode()
    world.add()
    world.ended(outcome=ReceptionOutcome.ABORTED, reason="x" * MAX_TEXT_CHARS)
    [said] = words_of(world)
    assert len(said.output.end.message) == MAX_TEXT_CHARS
    world.check_all_is_empty()


def test_cancel_while_waiting_frees_the_place():
    world = Decode(max_num_seqs=1)
    world.add("runs")
    world.add("waits")
    world.scheduler.cancel(("waits", 0), 1.0)
    assert outputs_of(world) == [("waits", 0, (), EndReason.CANCELLED)]
    assert commands_of(world)[-1] == ("CloseReception", "waits")
    assert world.scheduler.num_waiting == 0
    world.ended("waits")
    world.arrive("runs", token_id=EOS)
    world.check_all_is_empty()


@pytest.mark.parametrize("outcome", list(ReceptionOutcome))
def test_cancel_while_receiving_waits_for_the_receiver(outcome):
    world = Decode(max_num_seqs=1)
    job = world.add("r")
    behind = world.add("behind")
    world.scheduler.take_commands()
    world.scheduler.cancel(("r", 0), 1.0)
    world.scheduler.cancel(("r", 0), 1.0)
    assert job.state is RequestState.CLOSING
    assert world.scheduler.take_commands() == [CloseReception(("r", 0), "cancelled")]
    assert outputs_of(world) == [("r", 0, (), EndReason.CANCELLED)]
    assert behind.state is RequestState.OFFERED, "the receiver may still write to the blocks"
    world.ended(outcome=outcome, token_id=50 if outcome is ReceptionOutcome.ARRIVED else None)
    assert outputs_of(world) == []
    assert behind.state is RequestState.RECEIVING
    world.arrive("behind", token_id=EOS)
    world.check_all_is_empty()


def test_cancel_while_running_frees_at_once_and_says_what_was_not_said():
    world = Decode()
    world.add("r")
    world.arrive("r", token_id=50)
    world.scheduler.cancel(("r", 0), 2.0)
    assert outputs_of(world) == [("r", 0, (50,), EndReason.CANCELLED)]
    assert commands_of(world) == [("ExpectOffer", "r"), ("GrantKv", "r")]
    assert world.step() == []
    world.check_all_is_empty()


def test_a_gateway_that_is_gone_takes_its_own_requests_with_it():
    world = Decode(max_num_seqs=3)
    for request_id, gateway in (("runs", "one"), ("receives", "one"), ("other", "other"), ("waits", "one")):
        world.add(request_id, gateway=gateway)
    world.arrive("runs")
    world.scheduler.cancel_all_of("one", 2.0)
    assert {(name, end) for name, _, _, end in outputs_of(world)} == {
        (name, EndReason.CANCELLED) for name in ("runs", "receives", "waits")
    }
    world.ended("receives")
    world.ended("waits")  # it had got the place of "runs" for a moment, or never: nothing may come of it
    world.arrive("other", token_id=EOS)
    world.check_all_is_empty()


def test_events_of_unknown_requests_change_nothing():
    world = Decode()
    world.arrive("nobody")
    world.scheduler.cancel(("nobody", 0), 0.0)
    world.scheduler.expire(1e9)
    assert outputs_of(world) == commands_of(world) == []
    world.check_all_is_empty()


def test_a_second_end_of_a_reception_is_our_own_bug():
    world = Decode()
    world.add()
    world.arrive()
    with pytest.raises(IllegalMoveError, match="RUNNING -> RUNNING"):
        world.arrive()


def test_a_row_without_a_token_is_our_own_bug():
    world = Decode()
    world.add()
    world.arrive()
    with pytest.raises(AssertionError, match="sampled None"):
        world.scheduler.complete(world.scheduler.schedule(1.0), StepResult([None]), 1.0)
