"""Choices of one prompt with a grammar, at the doors of prefill and decode, from which the first choice is cancelled:
the others get its KV all the same, and at the end all is empty."""

import threading

import pytest

from decode.scheduler import DecodeLimits, DecodeScheduler
from decode.worker import DecodeRole
from engine.grammar_door import GrammarDoor
from engine.grammars import Grammars
from engine.queue_rules import QueueRules
from engine.token_masks import TokenMasks
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest, PrefillSource
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import EndReason, Sibling
from prefill.worker import PrefillRole
from tests.decode import test_worker as decode_side
from tests.grammar.made_grammars import regex
from tests.kvtransfer.samples import TARGET, spec
from tests.prefill import test_worker as prefill_side
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer

KEY, OTHERS = ("r", 0), ("s", "t")
REQUEST = spec("r", 3, grammar=regex("[a-z]+"))
SIBLINGS = tuple(Sibling(name, index) for index, name in enumerate(OTHERS, 1))
WITHIN_S = 30.0


class Side:
    """One worker's door, which opens when it is told to, and what the worker has said of each request's end."""

    def __init__(self, folder, make_role) -> None:
        self.grammars = Grammars(folder, VOCAB_SIZE, (EOS_ID,))
        self._may_compile, self._woken = threading.Event(), threading.Event()
        compile_now = self.grammars.matcher_for
        self.grammars.matcher_for = lambda request: self._may_compile.wait(WITHIN_S) and compile_now(request)
        self.door = GrammarDoor(self.grammars, TokenMasks(VOCAB_SIZE, self.grammars), self._woken.set)
        self.role = make_role(self.door)
        self.tokens: list[str] = []
        self.ends: dict[str, EndReason] = {}

    def open_door(self) -> None:
        self._may_compile.set()
        assert self._woken.wait(WITHIN_S)
        self.step()
        assert len(self.door) == 0

    def step(self) -> None:
        self.role.step()
        self.listen()

    def cancel(self, request_id: str) -> None:
        self.role.cancel("gw", Cancel(request_id, 0), 1.0)
        self.listen()

    def listen(self) -> None:
        for _, output in self.role.flush():
            assert output.request_id not in self.ends, "a word behind the last one"
            self.tokens += [output.request_id] * len(output.token_ids)
            if output.end is not None:
                self.ends[output.request_id] = output.end.reason

    def close(self) -> None:
        self._may_compile.set()
        self.role.stop()
        self.grammars.close()


def prefill_role(door) -> PrefillRole:
    engine = prefill_side.engine_with()
    scheduler, sender = prefill_side.scheduler_of(engine, max_num_seqs=4), prefill_side.RecordingSender()
    return PrefillRole(engine, scheduler, sender, clock=lambda: 1.0, door=door)


def decode_role(door) -> DecodeRole:
    engine = decode_side.engine_with()
    limits = DecodeLimits(8, 4, 64, 10.0, 100.0, 100.0)
    scheduler = DecodeScheduler(engine.pool, QueueRules(8), limits, frozenset({EOS_ID}))
    return DecodeRole(engine, scheduler, decode_side.RecordingReceiver(), clock=lambda: 1.0, door=door)


@pytest.fixture
def sides(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    made = Side(tmp_path, prefill_role), Side(tmp_path, decode_role)
    yield made
    for side in made:
        side.close()


@pytest.mark.parametrize("ahead", ["neither", "prefill", "decode"])
def test_the_first_choice_is_cancelled_and_the_others_get_their_kv(sides, ahead):
    """`ahead`: whose door has let the group in when the Cancel comes."""
    prefill, decode = sides
    prefill.role.add("gw", PrefillRequest(REQUEST, TARGET, siblings=SIBLINGS), 0.0)
    decode.role.add("gw", DecodeRequest(REQUEST, PrefillSource("prefill-0", "g1"), siblings=SIBLINGS), 0.0)
    for side in sides:
        if side is {"prefill": prefill, "decode": decode}.get(ahead):
            side.open_door()
    for side in sides:
        side.cancel("r")
        assert side.ends["r"] in (EndReason.CANCELLED, EndReason.HANDED_OVER)
        if len(side.door):
            side.open_door()
    hand_over(prefill, decode)
    for name in OTHERS:
        decode.cancel(name)
    assert decode.ends == dict.fromkeys("rst", EndReason.CANCELLED)
    assert set(prefill.tokens) >= set(OTHERS)
    assert set(decode.tokens) == set(OTHERS)
    for side in sides:
        assert side.role.is_empty()
        side.role.check_integrity()


def hand_over(prefill: Side, decode: Side) -> None:
    """What prefill's sender has been told comes to decode's receiver."""
    decode.role.on_transfer(KvOffered(KEY), 1.0)
    decode.listen()
    names = [call[0] for call in decode_side.calls_of(decode.role)]
    assert names == ["expect", "grant"]
    (first,) = [call for call in prefill_side.calls_of(prefill.role) if call[0] == "first_token"]
    _, key, token_id, _, siblings = first
    assert key == KEY
    assert set(siblings) == set(OTHERS)
    arrived = ReceptionEnded(KEY, ReceptionOutcome.ARRIVED, token_id, None, siblings=siblings)
    decode.role.on_transfer(arrived, 1.0)
    prefill.role.on_transfer(TransferEnded(KEY, TransferOutcome.DONE), 1.0)
    prefill.listen()
    decode.step()
