"""Decode's end of the KV hand-over, spoken to by peers that lie."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.incoming import MAX_PARKED_OFFERS
from kvtransfer.kv_messages import KvHello, KvOffer
from kvtransfer.peers import MAX_PEERS
from tests.fuzz.hostile import NAMES, NUMBERS, QUICK, TREES, VALUES, play, spoilt, tree_of
from tests.fuzz.receive_world import NUM_KEYS, ReceiveWorld, key_of, sequence_from
from tests.kvtransfer.samples import FINGERPRINT, FROM_DECODE, FROM_PREFILL, LAYOUT

CORPUS = sorted((Path(__file__).parent / "corpus").glob("receive-*.json"))
KEYS = st.integers(0, NUM_KEYS - 1)
FIELDS = (
    "request_id",
    "attempt",
    "num_tokens",
    "layer",
    "num_layers",
    "start",
    "stop",
    "head_start",
    "head_stop",
    "dtype",
    "token_id",
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=1)
SIZES = st.none() | st.lists(st.sampled_from([0, 1, 31, 32, 33, 64, 96, 1 << 12]), min_size=2, max_size=2)
KEYED = st.builds(
    lambda index, changes, message: (
        {**tree_of(message), "request_id": key_of(index)[0], "attempt": index % 2} | changes
    ),
    KEYS,
    CHANGES,
    st.sampled_from(FROM_PREFILL[1:]),
)
_SAID = KEYED | spoilt(st.sampled_from(FROM_PREFILL)) | spoilt(st.sampled_from(FROM_DECODE)) | TREES
SAID = _SAID | st.lists(_SAID, min_size=1, max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("expect"), KEYS),
    st.tuples(st.just("expect"), KEYS),
    st.tuples(st.just("grant")),
    st.tuples(st.just("close"), KEYS),
    *[st.tuples(st.just("next"), KEYS, st.just({}), st.just([0, 0]))] * 5,
    st.tuples(
        st.just("next"), KEYS, CHANGES, st.lists(st.sampled_from([-32, -1, 0, 0, 0, 1, 32]), min_size=2, max_size=2)
    ),
    st.tuples(st.just("say"), st.integers(0, 3), SAID, SIZES),
    st.tuples(st.just("say"), st.integers(0, 3), SAID, SIZES),
    st.tuples(st.just("pass"), st.sampled_from([1, 5, 30])),
)


@QUICK
@given(steps=st.lists(STEPS, min_size=5, max_size=60))
def test_no_sequence_of_messages_breaks_the_machine_or_an_honest_peers_transfer(steps):
    play(ReceiveWorld(), steps)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_sequences_that_were_interesting_once(path):
    play(ReceiveWorld(), sequence_from(path.read_bytes()))


def test_there_is_a_corpus():
    assert len(CORPUS) >= 8


def test_the_steps_reach_deep_enough_to_mean_anything():
    """The negative control: with the honest steps alone, everything arrives."""
    steps = [["expect", index] for index in range(NUM_KEYS)]
    for index in range(NUM_KEYS):
        steps += [["next", index, {}, [0, 0]], ["grant"], *[["next", index, {}, [0, 0]]] * 20]
    world = play(ReceiveWorld(), steps)
    assert len(world.ends) == NUM_KEYS
    assert {outcome.value for outcome in world.ends.values()} == {"arrived"}


def test_a_frame_that_lies_ends_its_own_transfer_and_no_other():
    lie = ["next", 1, {"start": 1}, [0, 0]]
    world = play(ReceiveWorld(), [["expect", 0], ["expect", 1], ["next", 1, {}, [0, 0]], ["grant"], lie])
    assert {key[0]: outcome.value for key, outcome in world.ends.items()} == {"r0": "arrived", "r1": "failed"}


@pytest.mark.parametrize("num_links", [1, 40])
def test_a_flood_of_offers_stays_within_its_bound_and_costs_an_honest_peer_nothing(num_links):
    """The honest offer waits for its reservation while others offer more than there is room for."""
    world = ReceiveWorld()
    for link in range(num_links):
        hello = KvHello(PROTOCOL_VERSION, f"flood-{link}", "g", FINGERPRINT, LAYOUT)
        world.machine.on_message(b"flood-%d" % link, hello, None, world.now)
    world._speak(b"prefill-0/g1", tree_of(KvOffer(*key_of(0), world.due[0].num_tokens)), None)
    world.due[0].left.pop(0)
    for number in range(MAX_PARKED_OFFERS + 500):
        link = b"flood-%d" % (number % num_links)
        world.machine.on_message(link, KvOffer(f"flood-{number}", 0, 5), None, world.now)
        assert world.machine._book.num_parked <= MAX_PARKED_OFFERS
    world.play(["expect", 0])
    world.finish()


def test_a_flood_of_introductions_stays_within_its_bound():
    world = ReceiveWorld()
    for number in range(MAX_PEERS + 200):
        hello = KvHello(PROTOCOL_VERSION, f"flood-{number}", "g", FINGERPRINT, LAYOUT)
        world.machine.on_message(b"flood-%d" % number, hello, None, world.now)
    world.play(["expect", 0])
    world.finish()


@QUICK
@given(names=st.lists(NAMES, max_size=30), numbers=st.lists(NUMBERS, max_size=30))
def test_repeated_introductions_of_one_worker_are_one_peer(names, numbers):
    world = ReceiveWorld()
    before = len(world.machine._peers)
    for name, number in zip(names, numbers, strict=False):
        hello = tree_of(KvHello(PROTOCOL_VERSION, "prefill-9", "g", FINGERPRINT, LAYOUT)) | {"generation": name}
        world._speak(b"link-%d" % (number % 7), hello, None)
    assert len(world.machine._peers) <= before + 1
