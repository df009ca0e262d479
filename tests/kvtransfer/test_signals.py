"""A process ends with its exit code at once, whatever the interpreter would still have to clean up, and on a signal
wherever that falls while it loads."""

import signal
import subprocess
import sys
import time

import pytest

from kvtransfer.signals import EXIT_WITHIN_S, STOP_SIGNALS

SLOW_TO_LEAVE = """
import atexit, sys, time
from kvtransfer.signals import run_and_leave
atexit.register(time.sleep, 60)
def main():
    print("said")
    {end}
run_and_leave(main)
"""

LOADS = """
import os, sys, time, weakref
from kvtransfer.signals import exit_on_signals, run_and_leave

def hit(*_):
    os.kill(os.getpid(), {signum})
    time.sleep(30)
class InDel:
    def __del__(self):
        hit()
class Watched:
    pass
def in_del():
    InDel()
def in_del_for_ten_seconds():
    for _ in range(100):
        InDel()
        time.sleep(0.1)
def in_callback():
    watched = Watched()
    reference = weakref.ref(watched, hit)
    del watched
def in_broad_except():
    try:
        hit()
    except BaseException:
        pass
def in_plain_code():
    hit()

def main():
    exit_on_signals()
    try:
        {place}()
        print("goes on", flush=True)
        time.sleep(30)
        return 3
    finally:
        print("leaves in order", flush=True)
run_and_leave(main)
"""


def ended(source: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(("end", "code"), [("return 0", 0), ("return 3", 3), ("sys.exit(2)", 2), ("sys.exit()", 0)])
def test_the_exit_code_is_that_of_main_and_comes_at_once(end, code):
    process = ended(SLOW_TO_LEAVE.format(end=end))
    assert (process.returncode, process.stdout, process.stderr) == (code, "said\n", "")


def test_an_exception_is_not_hidden():
    process = ended(SLOW_TO_LEAVE.replace("time.sleep, 60", "print").format(end="raise OSError('why')"))
    assert process.returncode == 1
    assert "OSError: why" in process.stderr


@pytest.mark.parametrize("signum", STOP_SIGNALS)
@pytest.mark.parametrize("place", ["in_del", "in_callback", "in_broad_except"])
def test_a_signal_that_python_swallows_ends_a_process_that_loads(place, signum):
    start = time.monotonic()
    process = ended(LOADS.format(signum=int(signum), place=place))
    assert process.stdout == "goes on\n", "it was swallowed"
    assert process.returncode == 0
    assert time.monotonic() - start < EXIT_WITHIN_S + 5.0


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_amid_loading_lets_it_leave_in_order(signum):
    process = ended(LOADS.format(signum=int(signum), place="in_plain_code"))
    assert (process.returncode, process.stdout, process.stderr) == (0, "leaves in order\n", "")


def test_signals_that_keep_coming_do_not_put_the_end_off():
    process = ended(LOADS.format(signum=int(signal.SIGTERM), place="in_del_for_ten_seconds"))
    assert (process.returncode, process.stdout) == (0, "")
