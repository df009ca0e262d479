"""A process ends with its exit code at once, whatever the interpreter would still have to clean up."""

import subprocess
import sys

import pytest

SLOW_TO_LEAVE = """
import atexit, sys, time
from kvtransfer.signals import run_and_leave
atexit.register(time.sleep, 60)
def main():
    print("said")
    {end}
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
