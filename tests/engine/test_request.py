"""Request states, token slices and lifetime readings."""

import itertools

import pytest

from engine.request import IllegalMoveError, Request, RequestState, ScheduledRow, with_followers
from kvtransfer.request_parts import LifetimeEvent
from tests.kvtransfer.samples import spec

W, FOL, OFF, REC, RUN, PRE, HAND, CLOSE, END = RequestState
LEGAL = {
    (W, FOL),
    (FOL, RUN),
    (FOL, END),
    (W, OFF),
    (OFF, REC),
    (OFF, CLOSE),
    (OFF, END),
    (W, RUN),
    (W, CLOSE),
    (W, END),
    (REC, RUN),
    (REC, CLOSE),
    (REC, END),
    (RUN, PRE),
    (PRE, RUN),
    (PRE, END),
    (RUN, HAND),
    (RUN, CLOSE),
    (RUN, END),
    (HAND, CLOSE),
    (HAND, END),
    (CLOSE, END),
}


def request(num_prompt=3, output=()) -> Request:
    made = Request(spec("r", num_prompt, attempt=2), "gw")
    made.output_token_ids += output
    return made


@pytest.mark.parametrize(("old", "new"), [*itertools.product(RequestState, RequestState)])
def test_every_move(old, new):
    moved = Request(spec(), "gw", state=old)
    if (old, new) in LEGAL:
        moved.move(new)
        assert moved.state is new
    else:
        with pytest.raises(IllegalMoveError, match=f"{old.name} -> {new.name}"):
            moved.move(new)
        assert moved.state is old


def test_tokens_are_prompt_then_output():
    made = request(3, [7, 8])
    assert made.key == ("r", 2)
    assert (made.num_prompt, made.num_tokens, made.num_uncomputed) == (3, 5, 5)
    whole = [10, 11, 12, 7, 8]
    for start, stop in itertools.combinations(range(6), 2):
        assert made.token_slice(start, stop) == whole[start:stop]
    assert made.token_slice(2, 2) == []


def test_uncomputed_tokens():
    made = request(3, [7])
    made.num_computed = 3
    assert made.num_uncomputed == 1


def test_readings_count_from_the_receipt_and_the_first_reading_stands():
    made = request()
    made.record(LifetimeEvent.RECEIVED, 10.0)
    made.record(LifetimeEvent.RUNNING, 12.5)
    made.record(LifetimeEvent.RUNNING, 99.0)
    assert made.readings() == {LifetimeEvent.RECEIVED: 0.0, LifetimeEvent.RUNNING: 2.5}


@pytest.mark.parametrize(("start", "count", "samples"), [(0, 3, False), (0, 4, True), (3, 1, True), (2, 1, False)])
def test_a_row_samples_at_the_last_known_token(start, count, samples):
    row = ScheduledRow(request(3, [7]), start, count)
    assert row.stop == start + count
    assert row.samples is samples


def test_requests_are_compared_by_identity():
    assert request() != request()


def test_the_witness_is_told_of_each_event_once():
    told: list = []
    watched = request()
    watched.witness = lambda *what: told.append(what)
    for moment in (1.0, 2.0):
        watched.record(LifetimeEvent.RECEIVED, moment)
    watched.record(LifetimeEvent.RUNNING, 3.0)
    assert told == [(watched.key, LifetimeEvent.RECEIVED), (watched.key, LifetimeEvent.RUNNING)]
    assert watched.events[LifetimeEvent.RECEIVED] == 1.0


def test_a_follower_has_lived_through_what_its_leader_has_until_they_part():
    leader, follower, other = request(), request(), request()
    for member in (leader, follower, other):
        member.record(LifetimeEvent.RECEIVED, 10.0)
    follower.follow(leader)
    other.follow(leader)
    assert leader.num_members == 3
    leader.record(LifetimeEvent.RESERVED, 12.0)
    leader.record(LifetimeEvent.ENDED, 12.5)
    follower.record(LifetimeEvent.FIRST_TOKEN, 13.0)
    readings = {LifetimeEvent.RECEIVED: 0.0, LifetimeEvent.RESERVED: 2.0, LifetimeEvent.FIRST_TOKEN: 3.0}
    assert follower.readings() == readings
    follower.part()
    assert (follower.leader, leader.followers, leader.num_members) == (None, [other], 2)
    leader.record(LifetimeEvent.SPLICED, 14.0)
    assert follower.readings() == readings


def test_followers_draw_with_their_leader():
    leader, follower, other = request(), request(), request()
    follower.follow(leader)
    first, last = ScheduledRow(leader, 0, 2), ScheduledRow(leader, 2, 1)
    assert with_followers([first]) == [first]
    assert with_followers([last, ScheduledRow(other, 0, 3)]) == [
        last,
        ScheduledRow(follower, 3, 0),
        ScheduledRow(other, 0, 3),
    ]
