"""Processes are started, restarted a bounded number of times, and always stopped."""

import os
import time
from dataclasses import replace

import pytest

from launcher.errors import LaunchError
from launcher.process import ChildProcess
from launcher.supervisor import HEALTHY_UPTIME_S, MAX_RESTARTS, RestartBudget, Supervisor
from launcher.terminal import MAX_HELD_LINES, Terminal
from tests.launcher.children import POLITE, SHORT, STUBBORN, is_running, spec, wait_for


@pytest.fixture
def supervisors():
    made = []
    yield lambda *specs: made.append(Supervisor(specs, Terminal())) or made[-1]
    for supervisor in made:
        supervisor.stop()


def test_budget_grows_and_ends():
    budget = RestartBudget()
    assert [budget.next_delay(1.0) for _ in range(MAX_RESTARTS + 1)] == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_a_long_life_clears_the_record():
    budget = RestartBudget()
    for _ in range(MAX_RESTARTS):
        budget.next_delay(1.0)
    assert budget.next_delay(HEALTHY_UPTIME_S) == 1.0


def test_output_is_shown_under_the_name(capfd):
    child = ChildProcess(spec("decode-0", SHORT), Terminal())
    assert child.wait(10)
    assert child.last_lines() == ["first line", "reason"]
    assert child.exit_code == 3
    assert child.how_it_ended == "ended with exit code 3"
    assert capfd.readouterr().err == "decode-0  | first line\ndecode-0  | reason\n"


def test_a_child_keeps_to_its_cores():
    core = min(os.sched_getaffinity(0))
    script = "import os, time; time.sleep(0.5); print(*os.sched_getaffinity(0))"
    child = ChildProcess(replace(spec("x", script), cores=frozenset({core})), Terminal())
    assert child.wait(10)
    assert child.last_lines() == [str(core)]


def test_cores_that_are_not_there_are_a_line_in_the_log(capfd):
    child = ChildProcess(replace(spec("x", "import time; time.sleep(0.5)"), cores=frozenset({9999})), Terminal())
    assert child.wait(10)
    assert child.exit_code == 0
    assert "x may use all cores" in capfd.readouterr().err


def test_a_signal_is_named():
    child = ChildProcess(spec("x", POLITE), Terminal())
    child.kill()
    assert child.wait(10)
    assert child.how_it_ended == "was ended by SIGKILL"


def test_only_the_last_lines_are_kept():
    child = ChildProcess(spec("x", "for i in range(1000): print('line', i)"), Terminal())
    assert child.wait(10)
    assert child.last_lines() == [f"line {i}" for i in range(985, 1000)]


def test_death_before_ready_tells_the_last_lines(supervisors):
    supervisor = supervisors(spec("good", POLITE), spec("bad", SHORT))
    supervisor.start()
    with pytest.raises(LaunchError, match=r"bad ended with exit code 3 before it was ready.*\n  first line\n  reason"):
        wait_for(supervisor.check_all_alive)


def test_stop_is_one_term_for_all_then_kill(supervisors, capfd):
    supervisor = supervisors(spec("polite", POLITE), spec("deaf-0", STUBBORN), spec("deaf-1", STUBBORN))
    supervisor.start()
    pids = list(supervisor.pids.values())
    shown = []
    wait_for(lambda: shown.append(capfd.readouterr().err) or "".join(shown).count("| deaf") == 2)
    before = time.monotonic()
    supervisor.stop()
    assert 3.5 < time.monotonic() - before < 5.0
    assert not any(is_running(pid) for pid in pids)


def test_polite_children_stop_at_once(supervisors):
    supervisor = supervisors(spec("a", POLITE), spec("b", POLITE))
    supervisor.start()
    pids = list(supervisor.pids.values())
    before = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - before < 2.0
    assert not any(is_running(pid) for pid in pids)


def test_a_dead_child_is_started_again_after_its_delay(supervisors):
    supervisor = supervisors(spec("a", POLITE), spec("b", POLITE))
    supervisor.start()
    first = supervisor.pids
    now = time.monotonic()
    assert supervisor.tick(now) == []
    supervisor._children["b"].kill()
    wait_for(lambda: not is_running(first["b"]))
    assert supervisor.tick(now) == ["b was ended by SIGKILL; starting it again in 1 s (1 of 5)"]
    assert supervisor.tick(now + 0.9) == []
    assert supervisor.tick(now + 1.0) == ["b is started again"]
    assert supervisor.pids["a"] == first["a"]
    assert supervisor.pids["b"] != first["b"]
    assert is_running(supervisor.pids["b"])


def test_a_child_that_keeps_dying_ends_it(supervisors):
    supervisor = supervisors(spec("bad", "raise SystemExit(7)"))
    supervisor.start()

    def run_out():
        for step in range(1000):
            wait_for(lambda: supervisor._children["bad"].exit_code is not None)
            supervisor.tick(time.monotonic() + step)

    with pytest.raises(LaunchError, match="bad ended with exit code 7 after 5 restarts; giving up"):
        run_out()


def test_held_lines_come_afterwards_and_are_bounded(capfd):
    terminal = Terminal()
    terminal.line("before")
    with terminal.held():
        for number in range(MAX_HELD_LINES + 1):
            terminal.line(f"line {number}")
        assert capfd.readouterr().err == "before\n"
    lines = capfd.readouterr().err.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("line 1", f"line {MAX_HELD_LINES}", MAX_HELD_LINES)
    terminal.line("after")
    assert capfd.readouterr().err == "after\n"
