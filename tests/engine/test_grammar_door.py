"""Requests with grammars on their way into a worker: compiled beside the loop, refused or cancelled with one word."""

import threading

import pytest

from decode.scheduler import DecodeLimits, DecodeScheduler
from decode.worker import DecodeRole
from engine.errors import RejectedError
from engine.grammar_door import MAX_AT_DOOR, GrammarDoor
from engine.grammars import Grammars
from engine.queue_rules import QueueRules
from engine.token_masks import TokenMasks
from grammar.child import Child, ChildLostError, Death
from kvtransfer.messages import Cancel, DecodeRequest
from kvtransfer.request_parts import EndReason, Grammar, Sibling
from tests.decode.test_worker import RecordingReceiver, engine_with, outputs_of
from tests.grammar.made_grammars import BAD, BOMBS, grammar, regex
from tests.kvtransfer.samples import spec
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer

WITHIN_S = 30.0
EOS = frozenset({EOS_ID})


class World:
    """A decode role with a door, and how often it was woken."""

    def __init__(self, folder) -> None:
        self.woken = threading.Semaphore(0)
        self.grammars = Grammars(folder, VOCAB_SIZE, EOS)
        self.masks = TokenMasks(VOCAB_SIZE, self.grammars)
        self.door = GrammarDoor(self.grammars, self.masks, self.woken.release)
        engine = engine_with()
        limits = DecodeLimits(8, 4, 64, 10.0, 100.0, 100.0)
        self.role = DecodeRole(
            engine,
            DecodeScheduler(engine.pool, QueueRules(8), limits, EOS),
            RecordingReceiver(),
            clock=lambda: 1.0,
            door=self.door,
        )

    def add(self, wanted: Grammar, request_id="r", gateway="gw", siblings=(), **fields) -> None:
        request = spec(request_id, 3, grammar=wanted, **fields)
        self.role.add(gateway, DecodeRequest(request, None, siblings=siblings), 0.0)

    def wait(self) -> None:
        assert self.woken.acquire(timeout=WITHIN_S)
        while not all(group.future.done() for group in self.door._waiting.values()):
            assert self.woken.acquire(timeout=WITHIN_S)


@pytest.fixture
def world(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    made = World(tmp_path)
    yield made
    made.grammars.close()


def test_a_request_waits_at_the_door_and_goes_in(world):
    world.add(regex("[a-z]+"))
    assert not world.role.is_empty()
    assert world.role.load().num_waiting == 1
    world.add(regex("[a-z]+"))  # a repeated message
    world.wait()
    assert world.role.step()
    assert len(world.door) == 0
    assert outputs_of(world.role) == [("gw", 0, (60,), None)]


@pytest.mark.parametrize("name", [*BAD, *BOMBS])
def test_a_bad_grammar_is_rejected_and_the_next_one_served(world, name):
    world.add(grammar(*(BAD | BOMBS)[name]))
    world.wait()
    assert not world.role.step()
    assert outputs_of(world.role) == [("gw", 0, (), EndReason.REJECTED)]
    assert world.role.is_empty()
    world.add(regex("a"), "q")
    world.wait()
    assert world.role.step()


def test_a_resumed_output_must_follow_the_grammar(world):
    (a,) = make_tokenizer().encode("a", add_special_tokens=False)
    world.add(regex("a+"), resumed=[a, a])
    world.add(regex("b+"), "q", resumed=[a])
    world.wait()
    world.role.step()
    ends = {output.request_id: output.end for _, output in world.role.flush() if output.end is not None}
    assert ends["q"].reason is EndReason.REJECTED
    assert "does not follow" in ends["q"].message
    assert "r" not in ends


def test_cancelled_at_the_door(world):
    world.add(regex("a"))
    world.add(regex("b"), "q", "another")
    world.role.cancel("another", Cancel("r", 0), 1.0)
    assert outputs_of(world.role) == []
    world.role.cancel("gw", Cancel("r", 0), 1.0)
    assert outputs_of(world.role) == [("gw", 0, (), EndReason.CANCELLED)]
    world.role.cancel_all_of("another", 1.0)
    assert outputs_of(world.role) == [("another", 0, (), EndReason.CANCELLED)]
    assert world.role.is_empty()


GROUP = (Sibling("s", 1), Sibling("t", 2))


def ends_of(role) -> dict[str, EndReason | None]:
    return {output.request_id: output.end and output.end.reason for _, output in role.flush()}


def test_choices_of_one_prompt_wait_and_go_in_together(world):
    world.add(regex("[a-z]+"), siblings=GROUP)
    assert world.role.load().num_waiting == 1
    world.role.cancel("gw", Cancel("s", 0), 1.0)
    assert ends_of(world.role) == {"s": EndReason.CANCELLED}
    world.wait()
    assert world.role.step()
    assert ends_of(world.role) == {"r": None, "t": None}


def test_the_first_choice_is_cancelled_at_the_door_and_the_others_go_in(world):
    world.add(regex("[a-z]+"), siblings=GROUP)
    for _ in range(2):  # a repeated message changes nothing
        world.role.cancel("gw", Cancel("r", 0), 1.0)
    assert ends_of(world.role) == {"r": EndReason.CANCELLED}
    assert not world.role.is_empty()
    world.wait()
    assert world.role.step()
    assert ends_of(world.role) == {"s": None, "t": None}
    for request_id in "st":
        world.role.cancel("gw", Cancel(request_id, 0), 1.0)
    assert ends_of(world.role) == dict.fromkeys("st", EndReason.CANCELLED)
    assert world.role.is_empty()
    world.role.check_integrity()


@pytest.mark.parametrize("order", ["rst", "str", "srt"])
def test_all_choices_are_cancelled_at_the_door_one_after_the_other(world, order):
    world.add(regex("[a-z]+"), siblings=GROUP)
    for request_id in order:
        assert not world.role.is_empty()
        world.role.cancel("gw", Cancel(request_id, 0), 1.0)
        assert ends_of(world.role) == {request_id: EndReason.CANCELLED}
    assert world.role.is_empty()


def test_a_choice_that_was_cancelled_at_the_door_gets_no_second_word(world):
    for request_id, gateway, wanted in (("r", "gw", grammar(*BAD["unclosed"])), ("x", "another", regex("a"))):
        siblings = tuple(Sibling(request_id + name, index) for index, name in enumerate("st", 1))
        world.add(wanted, request_id, gateway, siblings=siblings)
        world.role.cancel(gateway, Cancel(request_id, 0), 1.0)
    world.role.cancel_all_of("another", 1.0)
    world.wait()
    assert not world.role.step()
    told = [(output.request_id, output.end.reason) for _, output in world.role.flush()]
    assert sorted(told) == sorted(
        [(name, EndReason.CANCELLED) for name in ("r", "x", "xs", "xt")]
        + [(name, EndReason.REJECTED) for name in ("rs", "rt")]
    )
    assert world.role.is_empty()


def test_who_has_a_known_grammar_does_not_wait_for_one_that_is_compiled(world, monkeypatch):
    world.add(regex("a+"))
    world.wait()
    assert world.role.step()
    world.role.flush()
    may_end, examine = threading.Event(), world.grammars._examiner.examine

    def slow(wanted):
        assert may_end.wait(WITHIN_S)
        return examine(wanted)

    monkeypatch.setattr(world.grammars._examiner, "examine", slow)
    world.add(regex("b+"), "slow")
    world.add(regex("c+"), "behind it")
    world.add(regex("a+"), "known")
    assert world.woken.acquire(timeout=WITHIN_S)
    assert world.role.step()
    assert {output.request_id for _, output in world.role.flush()} == {"r", "known"}
    may_end.set()
    world.wait()
    assert world.role.step()
    assert {output.request_id for _, output in world.role.flush()} == {"r", "slow", "behind it", "known"}


def test_a_role_that_stops_leaves_nothing_to_be_compiled_and_is_woken_no_more(world, monkeypatch):
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def slow(request):
        begun.release()
        assert may_end.wait(WITHIN_S)
        raise RejectedError("never mind")

    monkeypatch.setattr(world.grammars, "matcher_for", slow)
    for request_id in ("r", "q"):
        world.add(regex(request_id), request_id)
    assert begun.acquire(timeout=WITHIN_S)
    world.role.stop()
    may_end.set()
    for thread in (world.door._compiling, world.door._replaying):
        thread.shutdown(wait=True)
    assert not world.woken.acquire(blocking=False), "a loop was woken that may be another role's by now"
    assert not begun.acquire(blocking=False), "what had not begun was compiled after the end"


def test_choices_of_a_bad_grammar_are_all_rejected(world):
    world.add(grammar(*BAD["unclosed"]), siblings=GROUP)
    world.wait()
    assert not world.role.step()
    assert ends_of(world.role) == dict.fromkeys("rst", EndReason.REJECTED)


def test_a_group_without_a_first_token_ends_as_one(world):
    world.add(regex("[a-z]+"), siblings=GROUP)
    world.add(regex("[a-z]+"), "q")
    world.wait()
    world.role._take_from_door(1.0)
    world.masks.refuse(world.role._book.find(("s", 0)), "nothing is left")
    assert world.role.step()
    assert ends_of(world.role) == {**dict.fromkeys("rst", EndReason.REJECTED), "q": None}
    world.role.check_integrity()


def test_a_full_door_turns_away(world):
    for number in range(MAX_AT_DOOR):
        world.door._waiting[f"x{number}", 0] = (None, None)
    world.add(regex("a"))
    world.door._waiting.clear()
    assert outputs_of(world.role) == [("gw", 0, (), EndReason.OVERLOADED)]


def test_without_a_door_grammars_are_rejected():
    engine = engine_with()
    limits = DecodeLimits(8, 4, 64, 10.0, 100.0, 100.0)
    role = DecodeRole(engine, DecodeScheduler(engine.pool, QueueRules(8), limits, EOS), RecordingReceiver())
    role.add("gw", DecodeRequest(spec("r", 3, grammar=regex("a")), None), 0.0)
    assert outputs_of(role) == [("gw", 0, (), EndReason.REJECTED)]


def test_a_request_that_no_token_is_left_for_ends_and_the_others_go_on(world):
    for request_id in ("r", "q"):
        world.add(regex("[a-z]+"), request_id)
    world.wait()
    assert world.role.step()
    world.role.flush()
    stuck = world.role._book.find(("r", 0))
    world.masks.refuse(stuck, "nothing is left")
    assert world.role.step()
    ends = {output.request_id: (output.token_ids, output.end) for _, output in world.role.flush()}
    assert ends["r"][1].reason is EndReason.REJECTED
    assert ends["r"][0] == ()
    assert ends["q"] == ((60,), None)
    world.role.check_integrity()


def test_an_accident_in_the_compiler_fails_its_request_alone(world, monkeypatch, caplog):
    def fail(request):
        raise RuntimeError("boom")

    monkeypatch.setattr(world.grammars, "matcher_for", fail)
    world.add(regex("a"))
    world.wait()
    assert not world.role.step()
    assert outputs_of(world.role) == [("gw", 0, (), EndReason.FAILED)]
    assert "boom" in caplog.text


def test_a_grammar_whose_examiner_was_lost_fails_so_that_another_worker_is_asked(world, monkeypatch):
    def ask(child, *_):
        child.end()
        raise ChildLostError(Death.FOREIGN)

    monkeypatch.setattr(Child, "ask", ask)
    world.add(regex("[a-z]+"), siblings=GROUP)
    world.wait()
    assert not world.role.step()
    assert ends_of(world.role) == dict.fromkeys("rst", EndReason.FAILED)
    assert world.role.is_empty()
    monkeypatch.undo()
    world.add(regex("[a-z]+"), "q")
    world.wait()
    assert world.role.step()


def test_a_grammar_and_ignore_eos_do_not_go_together(world):
    world.add(regex("a"), ignore_eos=True)
    assert outputs_of(world.role) == [("gw", 0, (), EndReason.REJECTED)]
