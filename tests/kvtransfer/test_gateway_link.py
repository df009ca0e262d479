"""One link to a gateway as a state machine: what counts, what ends it, and what is of a time that is over."""

import pytest

from kvtransfer.gateway_link import HELLO_INTERVAL_S, REFUSED_INTERVAL_S, GatewayLink, LinkState
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    GatewayBeat,
    PrefillRequest,
    PrefillSource,
    Refused,
    Reintroduce,
    Welcome,
)
from tests.kvtransfer.samples import spec


def welcomed(num_taken: int = 0, introduction: int = 1) -> GatewayLink:
    link = GatewayLink("tcp://g:1", introduction=introduction)
    assert link.welcome(Welcome("e1", introduction), 1.0)
    for number in range(1, num_taken + 1):
        assert link.loss_by(Cancel("r", 0, number)) is None
        assert link.takes(Cancel("r", 0, number))
    return link


@pytest.mark.parametrize(
    "message",
    [
        GatewayBeat("e1", 2),
        Cancel("r", 0, 3),
        PrefillRequest(spec(), None, 3),
        DecodeRequest(spec(), PrefillSource("prefill-0", "g1"), 3),
        Welcome("e1", 1),
    ],
)
def test_what_has_the_right_number_is_no_loss(message):
    assert welcomed(num_taken=2).loss_by(message) is None


@pytest.mark.parametrize(
    ("message", "loss"),
    [
        (GatewayBeat("e1", 3), "had sent 3 messages, 2 came"),
        (GatewayBeat("e1", 1), "had sent 1 messages, 2 came"),
        (GatewayBeat("e2", 2), "was restarted"),
        (Welcome("e2", 1), "was restarted"),
        (Cancel("r", 0, 4), "sent message 4 behind message 2"),
        (Cancel("r", 0, 2), "sent message 2 behind message 2"),
        (Cancel("r", 0), "sent message 0 behind message 2"),
        (PrefillRequest(spec(), None, 4), "sent message 4 behind message 2"),
        (DecodeRequest(spec(), PrefillSource("prefill-0", "g1"), 1), "sent message 1 behind message 2"),
        (Reintroduce("e1"), "does not know us"),
        (Refused("differs"), "refuses us from now on"),
    ],
)
def test_what_ends_a_link_says_why(message, loss):
    assert welcomed(num_taken=2).loss_by(message) == loss


@pytest.mark.parametrize(
    "message", [GatewayBeat("e1", 9), GatewayBeat("e0", 0), Cancel("r", 0, 9), Reintroduce("e1"), Welcome("e0", 1)]
)
def test_late_words_of_the_time_before_count_for_nothing(message):
    link = welcomed(num_taken=2)
    link.lose()
    assert link.loss_by(message) is None
    if isinstance(message, Cancel):
        assert not link.takes(message)
    if isinstance(message, Welcome):
        assert not link.welcome(message, 2.0)
    assert (link.state, link.introduction) == (LinkState.GREETING, 2)


def test_a_repeated_welcome_does_not_begin_anew():
    link = welcomed(num_taken=2)
    link.num_sent = 5
    assert not link.welcome(Welcome("e1", 1), 2.0)
    assert (link.num_taken, link.num_sent) == (2, 5)


def test_numbers_begin_anew_with_the_next_introduction():
    link = welcomed(num_taken=2)
    link.num_sent = 5
    link.lose()
    assert link.welcome(Welcome("e1", 2), 2.0)
    assert (link.num_taken, link.num_sent, link.next_send) == (0, 0, 2.0)
    assert link.loss_by(Cancel("r", 0, 1)) is None


def test_a_loss_is_greeted_at_once_and_then_at_intervals():
    link = welcomed()
    link.next_send = 50.0
    link.lose()
    assert link.next_send == 0.0
    link.hello_said(10.0)
    assert link.next_send == 10.0 + HELLO_INTERVAL_S


def test_a_refusal_is_news_once_and_is_asked_about_seldom():
    link = GatewayLink("tcp://g:1")
    assert [link.refuse(reason, 10.0) for reason in ("a", "a", "b", "b")] == [True, False, True, False]
    assert (link.state, link.next_send) == (LinkState.REFUSED, 10.0 + REFUSED_INTERVAL_S)
    link.hello_said(15.0)
    assert link.next_send == 15.0 + REFUSED_INTERVAL_S


def test_who_refused_may_welcome_later_and_refuse_again():
    link = GatewayLink("tcp://g:1")
    link.refuse("a", 10.0)
    assert link.welcome(Welcome("e1", 1), 15.0)
    link.lose()
    assert link.refuse("a", 20.0)
