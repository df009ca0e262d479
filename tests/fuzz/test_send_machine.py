"""Prefill's end of the KV hand-over, spoken to by decode workers that lie."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.hostile import QUICK, TREES, VALUES, play, spoilt, tree_of
from tests.fuzz.receive_world import sequence_from
from tests.fuzz.send_world import NUM_KEYS, SendWorld, key_of
from tests.kvtransfer.samples import FROM_DECODE, FROM_PREFILL

CORPUS = sorted((Path(__file__).parent / "corpus").glob("send-*.json"))
KEYS = st.integers(0, NUM_KEYS - 1)
FIELDS = tuple(sorted({field for message in FROM_DECODE for field in message.__struct_fields__}))
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=1)
KEYED = st.builds(
    lambda index, changes, message: {
        **tree_of(message),
        **dict(zip(("request_id", "attempt"), key_of(index), strict=True)),
        **changes,
    },
    KEYS,
    CHANGES,
    st.sampled_from(FROM_DECODE[2:]),
)
_SAID = KEYED | spoilt(st.sampled_from(FROM_DECODE)) | spoilt(st.sampled_from(FROM_PREFILL)) | TREES
SAID = _SAID | st.lists(_SAID, min_size=1, max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("open"), KEYS),
    st.tuples(st.just("open"), KEYS),
    st.tuples(st.just("compute"), KEYS, st.integers(1, 5)),
    st.tuples(st.just("compute"), KEYS, st.integers(1, 5)),
    st.tuples(st.just("abort"), KEYS),
    st.tuples(st.just("answer"), KEYS),
    st.tuples(st.just("answer"), KEYS),
    st.tuples(st.just("say"), st.integers(0, 2), SAID),
    st.tuples(st.just("say"), st.integers(0, 2), KEYED),
    st.tuples(st.just("full"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from([1, 6, 30])),
)


@QUICK
@given(steps=st.lists(STEPS, min_size=5, max_size=60))
def test_no_sequence_of_messages_breaks_the_machine_or_an_honest_workers_transfer(steps):
    play(SendWorld(), steps)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_sequences_that_were_interesting_once(path):
    play(SendWorld(), sequence_from(path.read_bytes()))


def test_there_is_a_corpus():
    assert len(CORPUS) >= 4


def test_the_steps_reach_deep_enough_to_mean_anything():
    """The negative control: honest steps alone, and all is taken over but what goes to an address that isn't one."""
    steps: list = []
    for index in range(NUM_KEYS):
        steps += [["open", index]]
        steps += [step for _ in range(20) for step in (["compute", index, 3], ["answer", index])]
    ends = play(SendWorld(), steps).ends
    assert [ends[key_of(index)].value for index in range(NUM_KEYS)] == ["done"] * 5 + ["failed"]


def test_a_credit_for_more_than_was_sent_ends_that_workers_transfers_and_no_others():
    credit = {"type": "KvCredit", "request_id": "r1", "attempt": 1, "settled_bytes": 1}
    ends = play(SendWorld(), [["open", 0], ["open", 1], ["say", 0, credit]]).ends
    assert {key[0]: outcome.value for key, outcome in ends.items()} == {"r0": "done", "r1": "failed"}
