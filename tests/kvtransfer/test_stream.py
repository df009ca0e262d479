"""What has arrived on one link: only the next token of a layer is taken, and whatever is missing is asked for again."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.errors import ProtocolError
from kvtransfer.kv_messages import KvHeader, KvResend
from kvtransfer.stream import MAX_RESENDS_IN_VAIN, IncomingStream, Verdict

KEY, HEADS = ("r", 0), (0, 2)


def stream(num_tokens=8, first_token=0, num_layers=2) -> IncomingStream:
    made = IncomingStream(KEY, b"link", HEADS, num_tokens, num_layers, last_sign=0.0)
    if first_token is not None:
        made.grant(first_token)
    return made


def header(layer, start, stop, resend=0, heads=HEADS, num_layers=1) -> KvHeader:
    return KvHeader(*KEY, layer, start, stop, *heads, "float32", resend=resend, num_layers=num_layers)


def splice(incoming, layer, start, stop, resend=0) -> None:
    frame = header(layer, start, stop, resend)
    assert incoming.judge(frame) is Verdict.NEXT
    incoming.spliced(frame)


def test_each_layer_takes_its_tokens_in_order():
    incoming = stream()
    splice(incoming, 0, 0, 3)
    splice(incoming, 1, 0, 8)
    assert not incoming.has_all_kv
    splice(incoming, 0, 3, 8)
    assert incoming.has_all_kv


def test_layers_that_come_together_are_taken_together():
    incoming = stream(num_layers=3)
    both = header(1, 0, 8, num_layers=2)
    assert incoming.judge(both) is Verdict.NEXT
    incoming.spliced(both)
    assert not incoming.has_all_kv
    splice(incoming, 0, 0, 8)
    assert incoming.has_all_kv


def test_of_layers_that_come_together_none_is_taken_if_one_misses_a_token():
    incoming = stream(num_layers=3)
    splice(incoming, 0, 0, 3)
    splice(incoming, 2, 0, 3)
    frame = header(0, 3, 5, num_layers=3)
    assert incoming.judge(frame) is Verdict.GAP
    assert incoming.lost_layers(frame) == [0, 1, 2]


def test_of_layers_that_come_together_those_asked_for_already_are_not_asked_for_again():
    incoming = stream(num_layers=3)
    for layer in range(3):
        splice(incoming, layer, 0, 3)
    incoming.ask_again(1)
    frame = header(0, 3, 5, num_layers=3)
    assert incoming.judge(frame) is Verdict.GAP
    assert incoming.lost_layers(frame) == [0, 2]
    for layer in (0, 2):
        incoming.ask_again(layer)
    assert incoming.judge(frame) is Verdict.STALE


def test_layers_that_come_together_breach_the_protocol_together():
    incoming = stream(num_layers=3)
    splice(incoming, 2, 0, 3)
    with pytest.raises(ProtocolError, match="layer 2: token 0 again"):
        incoming.judge(header(0, 0, 3, num_layers=3))


@pytest.mark.parametrize(("layer", "start", "stop"), [(0, 4, 5), (1, 1, 2), (0, 7, 8)])
def test_a_frame_behind_the_next_one_is_a_gap(layer, start, stop):
    incoming = stream()
    splice(incoming, 0, 0, 3)
    assert incoming.judge(header(layer, start, stop)) is Verdict.GAP


@pytest.mark.parametrize(
    "breach",
    [
        header(0, 2, 4),
        header(0, 0, 3),
        header(0, 3, 9),
        header(1, 8, 9),
        header(0, 3, 4, resend=1),
        header(0, 3, 4, heads=(0, 1)),
        header(0, 3, 4, heads=(1, 2)),
    ],
    ids=["overlap", "repeat", "overrun", "beyond", "answer to nothing", "some heads", "other heads"],
)
def test_what_no_loss_explains_is_a_breach(breach):
    incoming = stream()
    splice(incoming, 0, 0, 3)
    with pytest.raises(ProtocolError):
        incoming.judge(breach)


def test_reception_starts_at_the_first_token_that_is_missing():
    incoming = stream(first_token=6)
    with pytest.raises(ProtocolError, match="token 0 again, expected from 6"):
        incoming.judge(header(0, 0, 2))
    for layer in (0, 1):
        splice(incoming, layer, 6, 8)
    assert incoming.has_all_kv
    assert stream(first_token=8).has_all_kv


def test_nothing_is_taken_before_the_grant_and_a_grant_comes_once():
    incoming = stream(num_tokens=1, first_token=None)
    assert not incoming.has_all_kv
    with pytest.raises(ProtocolError, match="before its grant"):
        incoming.judge(header(0, 0, 1))
    incoming.grant(1)
    assert incoming.has_all_kv
    with pytest.raises(AssertionError, match="granted twice"):
        incoming.grant(0)


def test_what_was_sent_before_the_resend_is_stale_and_the_answer_goes_on():
    incoming = stream()
    splice(incoming, 0, 0, 2)
    assert incoming.ask_again(0) == KvResend(*KEY, layer=0, start=2, number=1)
    assert incoming.ask_again(1) == KvResend(*KEY, layer=1, start=0, number=2)
    assert incoming.judge(header(0, 4, 6)) is Verdict.STALE
    assert incoming.judge(header(0, 0, 1)) is Verdict.STALE, "an older one may even repeat what is here"
    assert incoming.judge(header(0, 3, 4, resend=1)) is Verdict.GAP, "the answer's own first frame was lost"
    splice(incoming, 0, 2, 8, resend=1)
    splice(incoming, 1, 0, 8, resend=2)
    assert incoming.has_all_kv
    assert incoming.num_resends == 2


def test_a_layer_is_asked_for_a_bounded_number_of_times_in_vain():
    incoming = stream()
    for number in range(1, MAX_RESENDS_IN_VAIN + 1):
        assert incoming.ask_again(0).number == number
    assert incoming.ask_again(0) is None
    assert incoming.ask_again(1) is not None, "the others have their own count"
    splice(incoming, 0, 0, 1, resend=MAX_RESENDS_IN_VAIN)
    assert incoming.ask_again(0) is not None, "a token that arrives starts the count anew"


def test_bytes_settle_once_whether_they_arrive_or_are_lost():
    incoming = stream()
    assert incoming.settle(0, 10) == 0
    assert incoming.settle(30, 10) == 20
    assert incoming.settled_bytes == incoming.uncredited_bytes == 40
    assert incoming.settle(0, 10) == 0, "a message that says nothing loses nothing"
    incoming.credited_bytes = 50
    assert (incoming.settle(50), incoming.settle(60), incoming.uncredited_bytes) == (0, 10, 10)


def test_what_is_missing_depends_on_what_the_sender_has_heard():
    incoming = stream(num_layers=3)
    splice(incoming, 0, 0, 8)
    first = incoming.ask_again(1)
    assert incoming.missing_layers(num_heard=0) == [2]
    assert list(incoming.unheard_resends(num_heard=0)) == [first]
    assert incoming.missing_layers(num_heard=1) == [1, 2]
    assert list(incoming.unheard_resends(num_heard=1)) == []
    splice(incoming, 1, 0, 3, resend=1)
    assert incoming.missing_layers(num_heard=0) == [1, 2], "its answer has come, so it is no longer waited for"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_taken_covers_each_layer_once(data):
    num_tokens, num_layers = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    first_token = data.draw(st.integers(0, num_tokens))
    incoming = stream(num_tokens, first_token, num_layers)
    taken = []
    for _ in range(40):
        layer = data.draw(st.integers(0, num_layers - 1))
        start, stop = sorted(data.draw(st.lists(st.integers(0, num_tokens + 1), min_size=2, max_size=2, unique=True)))
        frame = header(layer, start, stop, data.draw(st.integers(0, incoming.num_resends + 1)))
        try:
            verdict = incoming.judge(frame)
        except ProtocolError:
            continue
        if verdict is Verdict.NEXT:
            incoming.spliced(frame)
            taken.extend((layer, token) for token in range(start, stop))
        elif verdict is Verdict.GAP:
            incoming.ask_again(layer)
    assert len(taken) == len(set(taken))
    wanted = {(layer, token) for layer in range(num_layers) for token in range(first_token, num_tokens)}
    assert set(taken) <= wanted
    assert incoming.has_all_kv == (set(taken) == wanted)


@given(
    history=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9)), max_size=12),
    asked=st.sets(st.integers(0, 3), max_size=2),
    head=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 9), st.integers(1, 9), st.integers(0, 2)),
)
def test_the_comparison_in_one_finds_what_the_layers_find_one_by_one(history, asked, head):
    incoming = stream(num_layers=4)
    for layer, num_layers, size in history:
        start = incoming._next[layer]
        frame = header(layer, start, min(8, start + size), num_layers=min(num_layers, 4 - layer))
        if start < 8 and _is_next(incoming, frame):
            incoming.spliced(frame)
    for layer in asked:
        incoming.ask_again(layer)
    layer, num_layers, start, size, resend = head
    frame = header(layer, start, start + size, resend, num_layers=min(num_layers, 4 - layer))
    try:
        verdicts = {incoming._judge_layer(frame, at) for at in frame.layers}
    except ProtocolError:
        verdicts = set()
    if incoming._is_plainly_next(frame):
        assert verdicts == {Verdict.NEXT}
    elif verdicts == {Verdict.NEXT}:
        assert asked, "the quick way has to be there for all but what was asked for again"


def _is_next(incoming, frame) -> bool:
    try:
        return incoming.judge(frame) is Verdict.NEXT
    except ProtocolError:
        return False
