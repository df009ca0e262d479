"""The registry of workers: handshake, silence, stalls, replacement; each rule by the reply and by who is live."""

import msgspec
import pytest

from gateway.cluster import Cluster, ClusterSettings
from gateway.retired import RetiredStarts
from kvtransfer.codec import PROTOCOL_VERSION, encode
from kvtransfer.errors import IdentityError, MessageError, SettingsError
from kvtransfer.messages import Cancel, GatewayBeat, Goodbye, Refused, Reintroduce, Welcome, decode_from_gateway
from kvtransfer.request_parts import RequestOutput
from kvtransfer.worker_facts import Role
from tests.gateway.cluster_world import EPOCH, FINGERPRINT, LAYOUT, LIMITS, beat, hello, link, link_for, step

BOTH = ("prefill-0", "decode-0")


def make(*worker_ids: str, **settings) -> Cluster:
    cluster = Cluster(EPOCH, ClusterSettings(**settings))
    for worker_id in worker_ids:
        assert tell(cluster, worker_id, hello(worker_id), 0.0).reply == Welcome(EPOCH, 1)
        tell(cluster, worker_id, beat(), 0.0)
    return cluster


def tell(cluster: Cluster, worker_id: str, message, now: float):
    """A worker says `message` on its own connection."""
    return cluster.receive(link_for(worker_id, message), message, now)


def live(cluster: Cluster) -> list[tuple[str, str]]:
    return [(worker.worker_id, worker.generation) for worker in cluster.workers]


def changed(part, **changes):
    return msgspec.structs.replace(part, **changes)


# --- handshake ---------------------------------------------------------------------------------------


def test_a_worker_that_fits_is_welcomed_and_live():
    cluster = make()
    reaction = tell(cluster, "decode-0", hello("decode-0"), 1.0)
    assert reaction.reply == Welcome(EPOCH, 1)
    assert reaction.joined is not None
    assert live(cluster) == [("decode-0", "g1")]
    assert cluster.is_live("decode-0", "g1")
    assert not cluster.is_live("decode-0", "g2")


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        ("prefill-1", hello("prefill-1", protocol=1), f"protocol version: 1 != {PROTOCOL_VERSION}"),
        ("somebody", hello("prefill-1"), "worker id does not match"),
        ("decode-1", hello("decode-1", kv_endpoint=None), "decode workers name a KV endpoint"),
        ("prefill-1", hello("prefill-1", kv_endpoint="tcp://h:1"), "prefill workers do not"),
        ("decode-0", hello("decode-0", "g2", role=Role.PREFILL, kv_endpoint=None), "is for a decode worker, this is a"),
        (
            "prefill-1",
            hello("prefill-1", role=Role.DECODE, kv_endpoint="tcp://h:1"),
            "is for a prefill worker, this is a",
        ),
        ("prefill-1", hello("prefill-1", fingerprint=changed(FINGERPRINT, weights="w1")), "weights: w1 != w0"),
        (
            "prefill-1",
            hello("prefill-1", fingerprint=changed(FINGERPRINT, architecture="Q")),
            "architecture: Q != Llama",
        ),
        ("prefill-1", hello("prefill-1", layout=changed(LAYOUT, head_dim=32)), "KV head_dim: 32 != 64"),
        ("prefill-1", hello("prefill-1", layout=changed(LAYOUT, dtype="fp8")), "KV dtype: fp8 != float32"),
        (
            "prefill-1",
            hello("prefill-1", fingerprint=changed(FINGERPRINT, vocab_size=89)),
            "vocab_size: the model has 89",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_differs(sender, message, reason):
    cluster = make(*BOTH, tokenizer_vocab_size=90)
    reaction = tell(cluster, sender, message, 1.0)
    assert isinstance(reaction.reply, Refused)
    assert reason in reaction.reply.reason
    assert reaction.departed is None
    assert live(cluster) == [("decode-0", "g1"), ("prefill-0", "g1")]


def test_a_misfit_under_a_live_workers_id_is_refused_and_the_live_one_stays():
    cluster = make(*BOTH)
    other_model = changed(hello().fingerprint, weights="w9")
    reaction = tell(cluster, "decode-0", hello("decode-0", "g2", fingerprint=other_model), 1.0)
    assert isinstance(reaction.reply, Refused)
    assert reaction.departed is None
    assert cluster.is_live("decode-0", "g1")


def test_an_id_that_names_no_role_is_for_either_until_somebody_has_it():
    cluster = make()
    assert tell(cluster, "node-7", hello("node-7", kv_endpoint="tcp://h:1"), 0.0).reply == Welcome(EPOCH, 1)
    other = hello("node-7", "g2", role=Role.PREFILL, kv_endpoint=None)
    reply = tell(cluster, "node-7", other, 0.0).reply
    assert isinstance(reply, Refused)
    assert "belongs to a live decode worker" in reply.reason


def test_all_differences_are_named_at_once():
    wrong = hello("prefill-1", fingerprint=changed(FINGERPRINT, weights="w1", dtype="bfloat16"))
    reply = tell(make("decode-0"), "prefill-1", wrong, 1.0).reply
    assert reply == Refused("differs from decode-0: model weights: w1 != w0; model dtype: bfloat16 != float32")


def test_a_refusal_decodes_however_long_the_values_are():
    long = changed(FINGERPRINT, architecture="a" * 2048, config="b" * 2048, weights="c" * 2048, dtype="d" * 2048)
    reply = tell(make("decode-0"), "prefill-1", hello("prefill-1", fingerprint=long), 1.0).reply
    assert decode_from_gateway(encode(reply)) == reply


def test_block_size_and_limits_may_differ():
    cluster = make("decode-0")
    other = hello("prefill-0", layout=changed(LAYOUT, block_size=32), limits=changed(LIMITS, max_model_len=500))
    assert tell(cluster, "prefill-0", other, 1.0).reply == Welcome(EPOCH, 1)
    assert cluster.status(1.0).max_model_len == 500


@pytest.mark.parametrize(("tokenizer", "fits"), [(99, True), (100, True), (101, False)])
def test_the_tokenizer_may_be_smaller_than_the_model_never_larger(tokenizer, fits):
    cluster = Cluster(EPOCH, ClusterSettings(tokenizer_vocab_size=tokenizer))
    reply = tell(cluster, "prefill-0", hello(), 1.0).reply
    assert isinstance(reply, Welcome if fits else Refused)
    assert cluster.vocab_size == (100 if fits else None)


def test_the_model_may_change_once_the_last_worker_has_gone():
    cluster = make("decode-0")
    other = hello("prefill-0", fingerprint=changed(FINGERPRINT, weights="w1"))
    assert isinstance(tell(cluster, "prefill-0", other, 1.0).reply, Refused)
    tell(cluster, "decode-0", Goodbye("g1", "bye"), 1.0)
    assert tell(cluster, "prefill-0", other, 1.0).reply == Welcome(EPOCH, 1)


def test_the_registry_is_bounded():
    cluster = make(*BOTH, max_workers=2)
    reply = tell(cluster, "decode-1", hello("decode-1"), 1.0).reply
    assert isinstance(reply, Refused)
    assert "at most 2" in reply.reason


# --- who is who --------------------------------------------------------------------------------------


def test_a_newer_generation_replaces_the_older_one():
    cluster = make(*BOTH)
    reaction = tell(cluster, "decode-0", hello("decode-0", "g2"), 1.0)
    assert reaction.reply == Welcome(EPOCH, 1)
    assert reaction.departed is not None
    assert reaction.departed.worker.generation == "g1"
    assert live(cluster) == [("decode-0", "g2"), ("prefill-0", "g1")]


def test_a_replaced_generation_never_comes_back():
    cluster = make("decode-0")
    tell(cluster, "decode-0", hello("decode-0", "g2"), 1.0)
    assert tell(cluster, "decode-0", beat("g1"), 1.1).reply == Reintroduce(EPOCH)
    reply = tell(cluster, "decode-0", hello("decode-0", "g1"), 1.2).reply
    assert isinstance(reply, Refused)
    assert "choose another id" in reply.reason
    assert live(cluster) == [("decode-0", "g2")]


def test_replies_go_to_the_connection_of_the_live_start():
    cluster = make(*BOTH)
    assert cluster.link_to("decode-0") == link("decode-0", "g1")
    other_model = changed(FINGERPRINT, weights="w9")
    assert isinstance(tell(cluster, "decode-0", hello("decode-0", "g2", fingerprint=other_model), 1.0).reply, Refused)
    assert cluster.link_to("decode-0") == link("decode-0", "g1")
    tell(cluster, "decode-0", hello("decode-0", "g3"), 1.0)
    assert cluster.link_to("decode-0") == link("decode-0", "g3")
    assert cluster.link_to("decode-9") is None


THIEF = "decode-0/g1/guessed"


@pytest.mark.parametrize(
    "message",
    [hello("decode-0"), hello("decode-0", introduction=2), beat(), step(), Goodbye("g1", "bye"), MessageError("bad")],
    ids=lambda message: type(message).__name__,
)
def test_what_is_said_on_another_connection_does_not_touch_the_live_worker(message):
    cluster = make(*BOTH)
    reaction = cluster.receive(THIEF, message, 1.0)
    assert isinstance(reaction.reply, Refused | Reintroduce)
    assert (reaction.departed, reaction.joined, reaction.outputs) == (None, None, ())
    assert cluster.link_to("decode-0") == link("decode-0")
    assert tell(cluster, "decode-0", step(), 1.1).worker is not None


def test_a_key_that_does_not_speak_for_the_worker_is_told_so():
    reply = make().receive("decode-0/g1/n", IdentityError("the key of prefill does not"), 1.0).reply
    assert reply == Refused("the key of prefill does not")


def test_a_lone_worker_may_come_back_with_another_model():
    cluster = make("decode-0")
    other = hello("decode-0", "g2", fingerprint=changed(FINGERPRINT, weights="w1"))
    assert tell(cluster, "decode-0", other, 1.0).reply == Welcome(EPOCH, 1)


def test_a_hello_said_again_before_the_welcome_came_through_changes_nothing():
    cluster = make()
    tell(cluster, "decode-0", hello("decode-0"), 1.0)
    reaction = tell(cluster, "decode-0", hello("decode-0"), 1.5)
    assert (reaction.reply, reaction.departed, reaction.joined) == (Welcome(EPOCH, 1), None, None)


def test_another_introduction_means_that_the_worker_dropped_our_requests():
    cluster = make("decode-0")
    reaction = tell(cluster, "decode-0", hello("decode-0", introduction=2), 1.5)
    assert reaction.reply == Welcome(EPOCH, 2)
    assert reaction.departed is not None
    assert live(cluster) == [("decode-0", "g1")]


@pytest.mark.parametrize("message", [beat(), step(), Goodbye("g1", "bye")])
def test_strangers_are_asked_to_introduce_themselves(message):
    reaction = tell(make(), "decode-0", message, 1.0)
    assert reaction.reply == Reintroduce(EPOCH)
    assert reaction.worker is None


def test_outputs_of_another_generation_are_not_taken():
    cluster = make("decode-0")
    output = RequestOutput("r", 0, 0, (1,))
    assert tell(cluster, "decode-0", step(output, generation="g0"), 1.0).outputs == ()
    assert tell(cluster, "decode-0", step(output), 1.0).outputs == (output,)


def test_goodbye_ends_it_at_once_and_for_good():
    cluster = make("decode-0")
    reaction = tell(cluster, "decode-0", Goodbye("g1", "SIGTERM"), 1.0)
    assert reaction.departed is not None
    assert reaction.departed.reason == "left: SIGTERM"
    assert live(cluster) == []
    assert tell(cluster, "decode-0", beat(), 1.1).reply is None  # it drains; don't call it back
    assert isinstance(tell(cluster, "decode-0", hello("decode-0"), 1.2).reply, Refused)
    assert tell(cluster, "decode-0", hello("decode-0", "g2"), 1.3).reply == Welcome(EPOCH, 1)


def test_the_memory_of_past_generations_is_bounded():
    cluster = make("decode-0")
    for number in range(2, RetiredStarts.MAX_RETIRED + 10):
        tell(cluster, "decode-0", hello("decode-0", f"g{number}"), 1.0)
    assert len(cluster._retired) == RetiredStarts.MAX_RETIRED
    assert ("decode-0", "g1") not in cluster._retired


def test_a_malformed_message_costs_its_sender_its_place_and_nobody_else_anything():
    cluster = make(*BOTH)
    reaction = tell(cluster, "decode-0", MessageError("bad"), 1.0)
    assert isinstance(reaction.reply, Refused)
    assert reaction.departed is not None
    assert reaction.departed.worker.worker_id == "decode-0"
    assert isinstance(tell(cluster, "nobody", MessageError("bad"), 1.0).reply, Refused)
    assert cluster.num_malformed == 2
    assert live(cluster) == [("prefill-0", "g1")]


# --- lost messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after_two",
    [step(sequence=2), step(sequence=4), step(sequence=1), beat(sequence=3), beat(sequence=1), beat(sequence=0)],
)
def test_a_missing_or_repeated_number_costs_the_worker_its_place_until_it_comes_anew(after_two):
    cluster = make(*BOTH)
    for message in (beat(sequence=0), step(sequence=1), beat(sequence=1), step(sequence=2), beat(sequence=2)):
        assert tell(cluster, "decode-0", message, 1.0).departed is None
    reaction = tell(cluster, "decode-0", after_two, 1.1)
    assert reaction.reply == Reintroduce(EPOCH)
    assert reaction.departed is not None
    assert reaction.departed.reason == "messages were lost"
    assert reaction.outputs == ()
    assert live(cluster) == [("prefill-0", "g1")]
    assert tell(cluster, "decode-0", step(sequence=3), 1.2).reply == Reintroduce(EPOCH)  # was on its way
    assert tell(cluster, "decode-0", hello("decode-0", introduction=2), 1.3).reply == Welcome(EPOCH, 2)
    assert tell(cluster, "decode-0", step(sequence=1), 1.4).departed is None


def test_numbers_of_another_generation_do_not_count():
    cluster = make("decode-0")
    assert tell(cluster, "decode-0", step(generation="g0", sequence=9), 1.0).departed is None
    assert tell(cluster, "decode-0", step(sequence=1), 1.0).departed is None


def send(cluster: Cluster, worker_id: str = "decode-0") -> int:
    message = cluster.numbered(worker_id, Cancel("r", 0))
    assert message is not None
    cluster.note_sent(worker_id)
    return message.sequence


def test_what_is_sent_is_numbered_for_each_worker_and_beats_name_the_last():
    cluster = make(*BOTH)
    assert [send(cluster), send(cluster), send(cluster, "prefill-0")] == [1, 2, 1]
    assert cluster.numbered("decode-0", Cancel("r", 0)) == Cancel("r", 0, 3)  # what isn't sent takes no number
    assert cluster.beat_to("decode-0") == GatewayBeat(EPOCH, 2)
    assert cluster.beat_to("prefill-0") == GatewayBeat(EPOCH, 1)
    assert cluster.numbered("nobody", Cancel("r", 0)) is None


def test_numbers_go_on_over_a_repeated_hello_and_begin_anew_with_another_introduction():
    cluster = make()
    tell(cluster, "decode-0", hello("decode-0"), 0.0)
    assert send(cluster) == 1
    tell(cluster, "decode-0", hello("decode-0"), 0.1)
    assert send(cluster) == 2
    tell(cluster, "decode-0", hello("decode-0", introduction=2), 0.2)
    assert cluster.beat_to("decode-0") == GatewayBeat(EPOCH, 0)
    assert send(cluster) == 1


# --- time --------------------------------------------------------------------------------------------


def ticks(cluster: Cluster, start: float, stop: float, step: float = 0.25):
    """Ticks every `step` seconds in (start, stop]; returns (time, departed ids) of those that lost somebody."""
    losses = []
    now = start
    while now < stop:
        now += step
        departed = cluster.tick(now).departed
        if departed:
            losses.append((now, [departure.worker.worker_id for departure in departed]))
    return losses


def test_a_silent_worker_is_given_up_within_3_s_and_one_that_beats_is_not():
    cluster = make(*BOTH)
    cluster.tick(0.0)
    lost = []
    for half_seconds in range(1, 9):
        tell(cluster, "prefill-0", beat(), half_seconds / 2)
        lost += ticks(cluster, half_seconds / 2 - 0.25, half_seconds / 2)
    assert lost == [(2.0, ["decode-0"])]
    assert live(cluster) == [("prefill-0", "g1")]


def test_step_outputs_are_a_sign_of_life():
    cluster = make("decode-0")
    cluster.tick(0.0)
    assert ticks(cluster, 0.0, 1.75) == []
    tell(cluster, "decode-0", step(), 1.75)
    assert ticks(cluster, 1.75, 3.5) == []
    assert ticks(cluster, 3.5, 4.0) == [(3.75, ["decode-0"])]


def test_a_pause_of_the_gateway_itself_is_not_held_against_the_workers():
    cluster = make(*BOTH)
    cluster.tick(0.0)
    assert cluster.tick(30.0).departed == ()
    assert ticks(cluster, 30.0, 31.75) == []
    assert [ids for _, ids in ticks(cluster, 31.75, 33.0)] == [["decode-0", "prefill-0"]]


def test_who_was_heard_after_the_pause_is_judged_from_then_on():
    cluster = make(*BOTH)
    cluster.tick(0.0)
    tell(cluster, "decode-0", beat(), 30.0)  # read before the first tick
    cluster.tick(30.0)
    tell(cluster, "prefill-0", beat(), 31.5)
    assert ticks(cluster, 30.0, 32.25) == [(32.0, ["decode-0"])]


def test_beats_are_due_to_all_every_interval():
    cluster = make(*BOTH, dead_after_s=100)
    due = [cluster.tick(quarter / 4).beat_to for quarter in range(5)]
    everyone = ("decode-0", "prefill-0")
    assert due == [everyone, (), everyone, (), everyone]


def stall(cluster: Cluster, seconds: float, running: int, progress_step: int) -> list[str]:
    """Both workers beat for so long; decode with that load and progress. Returns the ids reported as stalled."""
    reported = []
    for half_seconds in range(1, int(seconds * 2) + 1):
        now = half_seconds / 2
        tell(cluster, "decode-0", beat(progress=1 + half_seconds * progress_step, running=running), now)
        tell(cluster, "prefill-0", beat(progress=half_seconds), now)
        reported += [worker.worker_id for worker in cluster.tick(now).stalled]
    return reported


def test_a_busy_worker_without_progress_gets_nothing_and_health_says_so():
    cluster = make(*BOTH, stalled_after_s=60)
    reported = stall(cluster, 61, running=1, progress_step=0)
    assert reported == ["decode-0"]
    assert cluster.capable(Role.DECODE, 61.0) == ()
    status = cluster.status(61.0)
    assert not status.ready
    assert status.reasons == ("no decode worker can take requests",)
    assert status.max_model_len is None


@pytest.mark.parametrize("running", [0, 1])
def test_progress_is_no_stall(running):
    cluster = make(*BOTH)
    assert stall(cluster, 200, running, progress_step=1) == []
    assert cluster.status(200.0).ready


def test_an_engine_that_dies_while_idle_is_noticed_before_anybody_needs_it():
    cluster = make(*BOTH, stalled_after_s=60)
    assert stall(cluster, 61, running=0, progress_step=0) == ["decode-0"]
    assert not cluster.status(61.0).ready


def test_a_pause_of_the_gateway_is_no_stall():
    cluster = make(*BOTH)
    stall(cluster, 10, running=1, progress_step=0)
    cluster.tick(110.0)
    assert cluster.status(110.0).ready


def test_a_stalled_worker_recovers_with_its_first_step():
    cluster = make(*BOTH)
    stall(cluster, 70, running=1, progress_step=0)
    assert not cluster.status(70.0).ready
    tell(cluster, "decode-0", beat(progress=2, running=1), 70.5)
    assert cluster.status(70.5).ready
    assert not cluster.workers[0].is_stalled


def test_a_draining_worker_gets_nothing_new_and_keeps_what_it_has():
    cluster = make(*BOTH)
    draining = changed(beat(running=1), draining=True)
    assert tell(cluster, "decode-0", draining, 1.0).departed is None
    assert cluster.capable(Role.DECODE, 1.0) == ()
    assert cluster.is_live("decode-0", "g1")
    assert cluster.status(1.0).reasons == ("no decode worker can take requests",)


# --- status ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker_ids", "reasons"),
    [
        ((), ("no prefill worker can take requests", "no decode worker can take requests")),
        (("prefill-0",), ("no decode worker can take requests",)),
        (("decode-0",), ("no prefill worker can take requests",)),
        (BOTH, ()),
    ],
)
def test_status_says_what_is_missing(worker_ids, reasons):
    status = make(*worker_ids).status(0.0)
    assert status.reasons == reasons
    assert status.ready is (not reasons)
    assert status.max_model_len == (None if reasons else 1000)


def test_the_last_load_of_each_worker_can_be_read():
    cluster = make(*BOTH)
    tell(cluster, "decode-0", beat(running=3, waiting=2, usage=0.5), 1.0)
    assert [worker.load.num_running for worker in cluster.workers] == [3, 0]
    assert cluster.workers[0].load.kv_usage == 0.5


@pytest.mark.parametrize("name", ["dead_after_s", "stalled_after_s", "beat_interval_s", "max_workers"])
def test_settings_are_checked(name):
    with pytest.raises(SettingsError, match=name):
        ClusterSettings(**{name: 0})
