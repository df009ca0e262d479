"""Modules that the launcher runs end with it, and with what interrupts it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.lifeline import run_module
from launcher.ports import usable_port
from tests.launcher.children import is_running, wait_for

RUN = """
import sys
from launcher.lifeline import run_module
try:
    run_module("tests.launcher.fake_gateway", sys.argv[1])
except KeyboardInterrupt:
    sys.exit(130)
"""


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def caller():
    """A process in the middle of `run_module`."""
    command = [sys.executable, "-c", RUN, str(usable_port("127.0.0.1", 0))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: children_of(process.pid))
        yield process
        process.kill()


def test_a_module_gets_its_arguments_and_gives_its_exit_code(capfd):
    assert run_module("calendar", "2024", "2") == 0
    assert "February 2024" in capfd.readouterr().out
    assert run_module("calendar", "no-year") == 2
    assert "calendar" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_it_ends_with_its_caller_and_says_nothing(caller, number, exit_code):
    (module,) = children_of(caller.pid)
    caller.send_signal(number)
    assert caller.wait(5) == exit_code
    wait_for(lambda: not is_running(module), 5)
    assert caller.stderr.read() == ""
