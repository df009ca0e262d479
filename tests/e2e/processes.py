"""One role as a real process: started with flags, watched, signalled by pid, its output kept in a file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXIT_WITHIN_S = 5.0
"""A process must be gone this soon after SIGTERM."""


def clean_environment() -> dict[str, str]:
    """This process's environment without our settings; one compute thread a process, as all share few cores."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSPLICE_")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def wait_until(condition: Callable[[], object], *, within_s: float, what: str) -> float:
    """Polls until `condition()` holds and returns the seconds it took; fails the test after `within_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start


class RoleProcess:
    """`python -m MODULE FLAGS` in a process group of its own."""

    def __init__(self, name: str, module: str, flags: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._signals_sent: list[signal.Signals] = []
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                cwd=REPOSITORY,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def state(self) -> str:
        """The kernel's letter for the process: R, S, T (stopped), Z..."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self._signals_sent.append(number)
        self._process.send_signal(number)

    def wait(self, within_s: float) -> int:
        """The exit code; fails the test if the process is still there after `within_s`."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {within_s:g} s\n{self.tail()}") from None

    def terminate(self) -> None:
        """SIGTERM if it still runs; does not wait."""
        if self.exit_code is None and signal.SIGTERM not in self._signals_sent:
            if signal.SIGSTOP in self._signals_sent:
                self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)

    def stop(self) -> None:
        """Ends it by SIGTERM, unless it has ended before: with 0, in time, leaving nobody of its process group."""
        if self.exit_code is None or signal.SIGTERM in self._signals_sent:
            self.terminate()
            try:
                exit_code = self.wait(EXIT_WITHIN_S)
            finally:
                self.kill()
            assert exit_code == 0, f"{self.name} ended with {exit_code} after SIGTERM\n{self.tail()}"
        self.assert_no_orphans()

    def kill(self) -> None:
        """SIGKILL if it still runs, and waits for its end."""
        if self.exit_code is None:
            self.send(signal.SIGKILL)
        self._process.wait(EXIT_WITHIN_S)

    def assert_no_orphans(self) -> None:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return
        raise AssertionError(f"{self.name} has ended, but processes of its group {self.pid} still run")

    def tail(self, lines: int = 40) -> str:
        return "\n".join([f"--- {self.name} ---", *self.output().splitlines()[-lines:]])
