"""Faults on purpose: what is accepted, when they happen, and that they do."""

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from kvtransfer.errors import SettingsError
from kvtransfer.faults import Fault, FaultAction, FaultPlan, InjectedFaultError, strike, unwatched, witness_of
from kvtransfer.request_parts import LifetimeEvent

CRITICAL_PROCESS = """
import time
from kvtransfer.faults import witness_of
from kvtransfer.request_parts import LifetimeEvent
witness = witness_of({fault!r})
for index in range(3):
    print(index, flush=True)
    witness((f"r{{index}}", 0), LifetimeEvent.SPLICED)
"""


@pytest.mark.parametrize("action", FaultAction)
@pytest.mark.parametrize("event", LifetimeEvent)
def test_every_action_at_every_event_can_be_asked_for(action, event):
    plan = FaultPlan.parse(f"{action.value}@{event.value}:3")
    assert plan == FaultPlan(action, event, 3)
    assert FaultPlan.parse(str(plan)) == plan
    assert EngineConfig(fault=str(plan)).fault == str(plan)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "ACTION@EVENT:N"),
        ("kill@spliced", "ACTION@EVENT:N"),
        ("kill@spliced:0", "ACTION@EVENT:N"),
        ("kill@spliced:-1", "ACTION@EVENT:N"),
        ("kill@spliced:1 ", "ACTION@EVENT:N"),
        ("kill@spliced:1\n", "ACTION@EVENT:N"),
        ("kill@spliced:10000000", "ACTION@EVENT:N"),
        ("KILL@spliced:1", "ACTION@EVENT:N"),
        ("burn@spliced:1", "one of kill, stop, die, die-kv, die-control, not 'burn'"),
        ("kill@eaten:1", "one of received,"),
    ],
)
def test_anything_else_is_refused_with_what_to_write(text, said):
    with pytest.raises(SettingsError, match="--fault") as refused:
        EngineConfig(fault=text)
    assert said in str(refused.value)


def test_it_happens_once_at_the_nth_request_that_reaches_the_event(caplog):
    struck: list = []
    fault = Fault(FaultPlan.parse("kill@running:2"), struck.append)
    with caplog.at_level(logging.CRITICAL):
        for request in ("a", "a", "a"):
            fault((request, 0), LifetimeEvent.RUNNING)
        fault(("b", 0), LifetimeEvent.SPLICED)
        assert struck == []
        assert caplog.records == []
        fault(("b", 0), LifetimeEvent.RUNNING)
    assert [record.getMessage() for record in caplog.records] == ["injected fault kill@running:2 at request b"]
    for request in ("b", "c", "d"):
        fault((request, 0), LifetimeEvent.RUNNING)
    assert struck == [FaultAction.KILL]


def test_nothing_is_watched_unless_a_fault_is_set():
    assert witness_of(None) is unwatched
    assert EngineConfig().fault is None
    assert unwatched(("r", 0), LifetimeEvent.ENDED) is None


def start(fault: str) -> subprocess.Popen:
    source = CRITICAL_PROCESS.format(fault=fault)
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kill_is_a_kill():
    process = start("kill@spliced:2")
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert out.split() == ["0", "1"]
    assert "injected fault kill@spliced:2 at request r1" in err


def test_stop_is_a_stop_and_the_process_goes_on_when_told():
    process = start("stop@spliced:2")
    state = Path(f"/proc/{process.pid}/stat")
    deadline = time.monotonic() + 60
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "never stopped"
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.split() == ["0", "1", "2"]


def test_a_fault_never_reached_changes_nothing():
    process = start("kill@spliced:4")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split(), err) == (0, ["0", "1", "2"], "")


def test_die_raises_in_the_engines_thread():
    with pytest.raises(InjectedFaultError):
        strike(FaultAction.DIE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("action", "name", "dies"),
    [
        (FaultAction.DIE_KV, "kv-receiver", True),
        (FaultAction.DIE_KV, "kv-sender", True),
        (FaultAction.DIE_CONTROL, "control", True),
        (FaultAction.DIE_KV, "control", False),
        (FaultAction.DIE_CONTROL, "kv-sender", False),
    ],
)
def test_the_other_threads_die_by_name(action, name, dies):
    may_end = threading.Event()

    def run() -> None:
        while not may_end.is_set():
            time.sleep(0.005)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        strike(action)
        thread.join(10.0 if dies else 0.2)
        assert thread.is_alive() is not dies
    finally:
        may_end.set()
        thread.join(10.0)
