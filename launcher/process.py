"""One child process: started, its output shown line by line under its name, stopped."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from typing import IO, Final

from launcher.plan import ChildSpec
from launcher.terminal import Terminal

KEPT_LINES: Final = 15
MAX_LINE_BYTES: Final = 1 << 16


class ChildProcess:
    """A running (or ended) process made of a ChildSpec.

    It has a process group of its own, so that Ctrl-C in the terminal reaches the launcher alone. Its stdin is the
    lifeline that `launcher.child` watches.
    """

    def __init__(self, spec: ChildSpec, terminal: Terminal) -> None:
        self.name = spec.name
        self._terminal = terminal
        self.started_at = time.monotonic()
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = subprocess.Popen(
            spec.command,
            env=dict(spec.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        if spec.cores is not None:
            self._keep_to(spec.cores)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._show, args=(self._process.stdout,), name=f"log of {spec.name}", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if a signal ended it."""
        return self._process.poll()

    @property
    def how_it_ended(self) -> str:
        code = self.exit_code
        assert code is not None, f"{self.name} still runs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_lines(self) -> list[str]:
        """The end of what it printed; complete once the process has ended."""
        self._reader.join(timeout=1.0)
        return list(self._tail)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s` seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        assert self._process.stdin is not None
        self._process.stdin.close()
        return True

    def _keep_to(self, cores: frozenset[int]) -> None:
        """It has one thread yet, and all others inherit what that may use."""
        try:
            os.sched_setaffinity(self.pid, cores)
        except OSError as error:  # a sandbox forbids it, or the process is gone already
            self._terminal.line(f"kvsplice: {self.name} may use all cores: {error.strerror}")

    def _show(self, output: IO[bytes]) -> None:
        """Reads to the end, so that the child never blocks on its log."""
        with output:
            while line := output.readline(MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip()
                self._tail.append(text)
                self._terminal.line(f"{self.name:<10}| {text}")
