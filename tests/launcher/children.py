"""Stand-ins for roles: small scripts under the real process handling."""

import os
import sys
import time

from launcher.plan import ChildSpec

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""
POLITE = 'import time; print("up", flush=True); time.sleep(60)'
SHORT = 'print("first line"); print("reason"); raise SystemExit(3)'


def spec(name, script):
    return ChildSpec(name, (sys.executable, "-c", script), os.environ)


def is_running(pid):
    """Whether `pid` is a process that has not ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=10.0):
    """Polls `condition` until it holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.02)
