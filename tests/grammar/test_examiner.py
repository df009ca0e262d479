"""A grammar that would take this process down takes its child down, and is refused; nobody else notices."""

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

from grammar.child import Child, ChildLostError, Death
from grammar.errors import CostError, GrammarError, UndecidedError
from grammar.examiner import CPU_SECONDS, READY, WALL_SECONDS, Examiner, Examiners, Outfit, Verdict
from tests.grammar.made_grammars import BAD, BOMBS, LARK, grammar, regex, tokenizer_json
from tests.tiny_models import EOS_ID, VOCAB_SIZE


def outfit() -> Outfit:
    return Outfit(tokenizer_json(), VOCAB_SIZE, (EOS_ID,))


@pytest.fixture
def examiner():
    made = Examiner(outfit)
    yield made
    made.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_child_answers_good_and_bad_alike(examiner):
    good = regex("[a-z]+")
    assert examiner.examine(good) == good
    child = examiner._child.pid
    for name in BAD:
        with pytest.raises(GrammarError):
            examiner.examine(grammar(*BAD[name]))
    assert examiner.examine(good) == good
    assert examiner._child.pid == child
    examiner.close()
    assert not is_running(child)


def test_gbnf_comes_back_as_lark(examiner):
    found = examiner.examine(grammar(LARK, 'root ::= "a" | "b"'))
    assert "start:" in found.text
    assert examiner.examine(found) == found


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_its_child_and_the_next_one_is_served(examiner, name):
    examiner.examine(regex("a"))
    child, start = examiner._child.pid, time.process_time()
    with pytest.raises(CostError, match="too much memory"):
        examiner.examine(grammar(*BOMBS[name]))
    assert time.process_time() - start < CPU_SECONDS / 4, "it was compiled here"
    assert not is_running(child)
    assert examiner.examine(regex("a")) == regex("a")


def test_a_child_that_was_lost_while_idle_is_replaced(examiner):
    examiner.examine(regex("a"))
    child = examiner._child.pid
    os.kill(child, signal.SIGKILL)
    examiner._child._process.wait()
    assert examiner.examine(regex("a")) == regex("a")
    assert examiner._child.pid != child


def test_a_child_that_stands_still_is_killed_and_the_next_one_is_served(examiner, monkeypatch):
    examiner.examine(regex("a"))
    monkeypatch.setattr("grammar.examiner.WALL_SECONDS", 1.5)
    child = examiner._child.pid
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(UndecidedError, match=r"within 1.5 s"):
        examiner.examine(regex("b"))
    assert not is_running(child)
    monkeypatch.undo()
    assert examiner.examine(regex("b")) == regex("b")


def test_a_start_a_loss_and_the_grammar_have_one_limit_together(examiner, monkeypatch):
    now, limits = itertools.count(0.0, 4.0), []  # each look at the clock is 4 s later

    def ask(child, frame, time_limit_s):
        limits.append(time_limit_s)
        if len(limits) == 2:
            child.end()
            raise ChildLostError(Death.FOREIGN)
        return READY if len(limits) % 2 else msgspec.msgpack.encode(Verdict("a"))

    monkeypatch.setattr(Child, "ask", ask)
    monkeypatch.setattr("grammar.examiner.time", SimpleNamespace(monotonic=lambda: next(now)))
    examiner.examine(regex("a"))
    assert limits == [WALL_SECONDS - spent for spent in (4.0, 8.0, 12.0, 16.0)]


def kill_over(monkeypatch, wanted, times) -> None:
    """Kills the next `times` children that get the grammar `wanted`."""
    frame, ask, left = msgspec.msgpack.encode(wanted), Child.ask, iter(range(times))

    def ask_of_dying(child, asked, time_limit_s):
        if asked == frame and next(left, None) is not None:
            os.kill(child.pid, signal.SIGKILL)
        return ask(child, asked, time_limit_s)

    monkeypatch.setattr(Child, "ask", ask_of_dying)


def test_a_child_that_somebody_kills_is_replaced_once(examiner, monkeypatch):
    examiner.examine(regex("a"))
    kill_over(monkeypatch, regex("b"), 1)
    assert examiner.examine(regex("b")) == regex("b")
    kill_over(monkeypatch, regex("c"), 2)
    with pytest.raises(UndecidedError, match="was killed"):
        examiner.examine(regex("c"))
    assert examiner.examine(regex("c")) == regex("c")


def test_closing_ends_a_child_that_is_waited_for():
    examiners = Examiners(1, outfit)
    examiners.examine(regex("a"))
    child = examiners._all[0]._child
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(examiners.examine, regex("b"))
        wait_until(examiners._idle.empty)
        examiners.close()
        with pytest.raises(UndecidedError, match="told to end"):
            waiting.result(WALL_SECONDS / 2)
    assert not is_running(child.pid)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_that_does_not_start_is_not_the_grammars_fault(examiner, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="does not start"):
        examiner.examine(regex("a"))


def test_a_model_that_takes_no_grammars_says_so_each_time():
    for broken in (Outfit("{}", VOCAB_SIZE, (EOS_ID,)), Outfit(tokenizer_json(), VOCAB_SIZE, ())):
        examiner = Examiner(lambda broken=broken: broken)
        for _ in range(2):
            with pytest.raises(GrammarError, match="this model"):
                examiner.examine(regex("a"))
        examiner.close()


def test_several_threads_share_a_few():
    examiners = Examiners(2, outfit)
    with ThreadPoolExecutor(6) as pool:
        asked = [regex(f"[a-z]{{{number}}}") for number in range(1, 13)]
        assert list(pool.map(examiners.examine, asked)) == asked
    children = [examiner._child.pid for examiner in examiners._all if examiner._child is not None]
    assert 1 <= len(children) <= 2
    examiners.close()
    assert not any(is_running(child) for child in children)
