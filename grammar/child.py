"""A process that answers one frame after the other, and may be lost; and what its end says of the frame that it had.

Frames are bytes behind their length, 4 bytes, little endian. A child ends with its parent, by the end of its stdin.
"""

import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import IO, Final

_ROOT: Final = Path(__file__).resolve().parent.parent
_OWN_SIGNALS: Final = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE}
)
"""What a process dies of that passes its limit of CPU time, or its stack, or gets no memory. Others are sent to it."""


class Death(Enum):
    """Why a child has not answered."""

    EXCESS = "excess"  # it has passed one of its own limits
    OVERDUE = "overdue"  # it was killed here, as its time was over by the clock
    FOREIGN = "foreign"  # somebody else has killed it: an operator, or a machine short of memory


class ChildLostError(Exception):
    """The child has ended, and so has not answered; `death` is why."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.value)
        self.death = death


class Child:
    """`python -m MODULE`. One thread at a time asks; any may end it."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may quote the client
            cwd=_ROOT,
            process_group=0,  # a Ctrl-C in the terminal is for its parent
        )
        self.end = weakref.finalize(self, _end, self._process)
        """Kills it, if it runs still; nothing the second time."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, frame: bytes, time_limit_s: float) -> bytes:
        """The answer to `frame`, within so long by the clock. Raises ChildLostError, and then the child is no more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        is_overdue = threading.Event()
        clock = threading.Timer(max(0.0, time_limit_s), self._stop, [is_overdue])
        clock.daemon = True
        clock.start()
        try:
            write_frame(self._process.stdin, frame)
            return read_frame(self._process.stdout)
        except (EOFError, BrokenPipeError, ValueError) as error:  # ValueError: another thread has closed the pipe
            death = self._bury()
            raise ChildLostError(Death.OVERDUE if is_overdue.is_set() else death) from error
        finally:
            clock.cancel()

    def _stop(self, is_overdue: threading.Event) -> None:
        is_overdue.set()
        self._process.kill()

    def _bury(self) -> Death:
        """Waits for its end, which its pipes show a little before it can be asked for."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self.end()
        code = self._process.returncode or 0
        return Death.EXCESS if code > 0 or -code in _OWN_SIGNALS else Death.FOREIGN


def write_frame(pipe: IO[bytes], body: bytes) -> None:
    """Raises BrokenPipeError."""
    pipe.write(len(body).to_bytes(4, "little") + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes:
    """Raises EOFError."""
    head = pipe.read(4)
    body = pipe.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    if not body:
        raise EOFError("the other end is gone")
    return body


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()  # before the pipes: a thread that reads one of them holds its lock until then
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
