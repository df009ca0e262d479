"""The output of `kvsplice generate`: one JSON object a line, as results come, fit for going on after any death.

A result is appended by one write, which leaves it to the kernel: kill -9 loses none that was written. The disk is
waited for (fsync) every few seconds and at the end: a machine that dies loses the last seconds, and the next run
computes them again. A line that a death has cut off is removed before anything is appended.
"""

import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec

from kvtransfer.errors import SettingsError

SYNC_EVERY_S: Final = 5.0
_BEGIN: Final = b'{"line":'


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the prompt, and of the output with the one that ended it."""

    prompt_tokens: int
    completion_tokens: int


class Result(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of input line `line`, counted from 1. `digest`: of all that decided about it. `line` comes first: by
    it a line that was cut off is told from somebody else's file."""

    line: Annotated[int, msgspec.Meta(ge=1)]
    text: str
    finish_reason: str
    usage: Usage
    digest: str
    custom_id: str | None = None


class ResultSink(Protocol):
    """Where results go. `done`: line number to digest, of those that are there from the start."""

    done: dict[int, str]

    def write(self, result: Result) -> None: ...

    def close(self) -> None: ...


class StandardOutput:
    """Results to whoever reads; nothing is there from the start."""

    def __init__(self) -> None:
        self.done: dict[int, str] = {}

    def write(self, result: Result) -> None:
        _write_whole(sys.stdout.fileno(), _encoded(result))

    def close(self) -> None:
        """Others may go on writing."""


class ResultFile:
    """Results in a file, which no other run may write to meanwhile. `done` has what earlier runs have left."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SettingsError: it cannot be opened, another run has it, or it holds something else."""
        self._path = path
        self._clock = clock
        self._synced_at = clock()
        self._file = _open_alone(path)
        try:
            self.done = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def write(self, result: Result) -> None:
        """Raises OSError, with a part of the line written or nothing: the next run removes that."""
        _write_whole(self._file, _encoded(result))
        if self._clock() - self._synced_at >= SYNC_EVERY_S:
            self._sync()

    def close(self) -> None:
        """What was written is on the disk when this returns."""
        try:
            self._sync()
        finally:
            os.close(self._file)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced_at = self._clock()

    def _read(self) -> dict[int, str]:
        """The results that are there; what comes behind the last line end is removed."""
        done: dict[int, str] = {}
        length = 0
        with open(self._file, "rb", closefd=False) as reader:
            for index, line in enumerate(reader, start=1):
                if not line.endswith(b"\n"):
                    self._check_torn(line)
                    break
                result = self._decode(index, line)
                done[result.line] = result.digest
                length += len(line)
        os.ftruncate(self._file, length)
        return done

    def _decode(self, index: int, line: bytes) -> Result:
        try:
            return msgspec.json.decode(line, type=Result)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._not_ours(f"its line {index}") from None

    def _check_torn(self, line: bytes) -> None:
        if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
            raise self._not_ours("its last line")

    def _not_ours(self, what: str) -> SettingsError:
        return SettingsError(f"--output: {what} is no result of kvsplice generate; name another file than {self._path}")


def open_results(path: str) -> ResultSink:
    """`-` is standard output. Raises SettingsError."""
    return StandardOutput() if path == "-" else ResultFile(Path(path))


def _open_alone(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise SettingsError(f"--output: cannot write {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise SettingsError(f"--output: {path} is no ordinary file; - is standard output")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise SettingsError(f"--output: another run is writing to {path}") from None
    return file


def _write_whole(file: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(file, left) :]


def _encoded(result: Result) -> bytes:
    return msgspec.json.encode(result) + b"\n"
