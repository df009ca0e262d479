"""Processes that die with their launcher: `python -m launcher.lifeline MODULE ARGUMENTS...` runs a module as one.

The launcher holds the other end of this process's stdin and never writes to it. The end of that pipe means that the
launcher is gone, however it went; then there is nobody to work for.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Final

STDIN: Final = 0


def die_with_launcher() -> None:
    """From now on the end of stdin is the end of this process."""
    threading.Thread(target=_wait_for_the_end, name="lifeline", daemon=True).start()


def run_module(module: str, *arguments: str) -> int:
    """Runs `python -m MODULE ARGUMENTS...` to its end and returns the exit code.

    It has a process group of its own, so that Ctrl-C in the terminal reaches the caller alone; whatever interrupts the
    caller ends it.
    """
    command = (sys.executable, "-m", "launcher.lifeline", module, *arguments)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    with process:
        try:
            return process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _wait_for_the_end() -> None:
    while os.read(STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_launcher()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
