"""When a connection is given up and when it is dialled anew: the states alone, on a made-up clock."""

import pytest

from kvtransfer.handshakes import FIRST_DELAY_S, MAX_DELAY_S, MAX_FAILURES, Handshakes, LineState


def given_up(at: float = 0.0) -> Handshakes:
    made = Handshakes()
    assert made.failed(at, is_refusal=True)
    return made


def test_a_refusal_is_the_end_at_once():
    assert given_up().state is LineState.GIVEN_UP


def test_a_handshake_that_breaks_off_may_do_so_a_few_times():
    made = Handshakes()
    assert [made.failed(0.0, is_refusal=False) for _ in range(MAX_FAILURES)] == [False] * (MAX_FAILURES - 1) + [True]


def test_a_server_that_stands_still_is_waited_for():
    """Each handshake then runs into libzmq's timeout."""
    made = Handshakes()
    assert not any(made.failed(5.0 * number, is_refusal=False) for number in range(100))
    assert [made.failed(500.0 + number / 10, is_refusal=False) for number in range(3)] == [False, False, True]


def test_what_was_up_in_between_counts_anew():
    made = Handshakes()
    for _ in range(10):
        assert not made.failed(0.0, is_refusal=False)
        assert not made.failed(0.0, is_refusal=False)
        made.succeeded()
        assert made.state is LineState.UP
        made.cut()
        assert made.state is LineState.DIALLING


def test_delays_grow_up_to_a_bound_and_begin_anew_after_a_success():
    made, now, delays = Handshakes(), 0.0, []
    for _ in range(30):
        assert made.failed(now, is_refusal=True)
        assert not made.is_due(now)
        delays.append(made.redial_at - now)
        now = made.redial_at
        assert made.is_due(now)
        made.redialled()
    assert delays[:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_S
    made.succeeded()
    assert made.failed(now, is_refusal=True)
    assert made.redial_at - now == FIRST_DELAY_S


def test_after_the_first_time_one_failure_is_enough():
    made = given_up()
    made.redialled()
    assert made.failed(1.0, is_refusal=False)


def test_a_cut_that_was_not_told_changes_nothing():
    made = Handshakes()
    made.succeeded()
    made.succeeded()
    assert made.state is LineState.UP
    assert made.failed(0.0, is_refusal=True)
    made.cut()
    assert made.state is LineState.GIVEN_UP


def test_illegal_moves_are_bugs():
    with pytest.raises(AssertionError, match="given up -> up"):
        given_up().succeeded()
    with pytest.raises(AssertionError, match="dialling -> dialling"):
        Handshakes().redialled()
    assert not Handshakes().is_due(1e9)
