"""Compiles grammars that nobody has seen yet in a process of its own, which may be lost.

A schema of forty characters can take the library minutes, gigabytes, or its stack, whatever limits it is given. So a
grammar is compiled first where that harms nobody:

    this process --Outfit, Grammar, Grammar, ...--> stdin of the child: compiles each, with a limit on CPU time
                 <--READY, Verdict, Verdict, ...--- stdout               and one on memory

A child that passes a limit is killed by the kernel, and the grammar that it had is refused. It ends with its parent, by
the end of its stdin, or at the latest at its limit. Frames are msgpack behind their length, 4 bytes, little endian.
"""

import queue
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import msgspec

from grammar.errors import CostError, GrammarError
from kvtransfer.messages import Grammar

CPU_SECONDS: Final = 2.0
"""For one grammar. Ordinary ones take milliseconds."""
MEMORY_BYTES: Final = 2 << 30
"""Address space of the child, of which 0.5 GiB are its own."""
READY: Final = b"ready"
_ROOT: Final = Path(__file__).resolve().parent.parent


class Outfit(msgspec.Struct, frozen=True):
    """What a child needs to know of the model: see `grammar.vocabulary.Vocabulary`."""

    tokenizer_json: str
    num_ids: int
    eos_token_ids: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """`text`: the grammar's, possibly translated. `fault`: what is wrong with it, or None."""

    text: str = ""
    fault: str | None = None
    is_costly: bool = False


class Examiner:
    """One child, started when it is first needed and again after a loss. For one thread at a time."""

    def __init__(self, outfit: Callable[[], Outfit]) -> None:
        """`outfit` is asked for at each start; it may raise GrammarError."""
        self._outfit = outfit
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Examiner] | None = None

    def examine(self, grammar: Grammar) -> Grammar:
        """`grammar` as workers take it. Raises GrammarError; RuntimeError if there can be no child."""
        try:
            verdict = self._ask(grammar)
        except (EOFError, BrokenPipeError) as error:
            self.close()
            raise CostError(f"it takes more than {CPU_SECONDS:g} s or too much memory to compile") from error
        if verdict.fault is not None:
            raise (CostError if verdict.is_costly else GrammarError)(verdict.fault)
        return msgspec.structs.replace(grammar, text=verdict.text)

    def close(self) -> None:
        """Ends the child, if there is one."""
        if self._end is not None:
            self._end()
        self._child = None

    def _ask(self, grammar: Grammar) -> Verdict:
        if self._child is not None and self._child.poll() is not None:
            self.close()  # lost while it was idle, which says nothing of this grammar
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        write_frame(child.stdin, msgspec.msgpack.encode(grammar))
        return msgspec.msgpack.decode(read_frame(child.stdout), type=Verdict)

    def _start(self) -> subprocess.Popen[bytes]:
        outfit = msgspec.msgpack.encode(self._outfit())
        child = subprocess.Popen(
            [sys.executable, "-m", "grammar.examination"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may quote the client
            cwd=_ROOT,
            process_group=0,  # a Ctrl-C in the terminal is for its parent
        )
        self._child, self._end = child, weakref.finalize(self, _end_child, child)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            write_frame(child.stdin, outfit)
            assert read_frame(child.stdout) == READY
        except (EOFError, BrokenPipeError) as error:
            self.close()
            raise RuntimeError("the process that examines grammars does not start") from error
        return child


class Examiners:
    """A few of them for several threads; who finds none idle waits."""

    def __init__(self, count: int, outfit: Callable[[], Outfit]) -> None:
        self._all = [Examiner(outfit) for _ in range(count)]
        self._idle: queue.LifoQueue[Examiner] = queue.LifoQueue()
        for examiner in self._all:
            self._idle.put(examiner)

    def examine(self, grammar: Grammar) -> Grammar:
        """As `Examiner.examine`."""
        with self._one() as examiner:
            return examiner.examine(grammar)

    def close(self) -> None:
        """Ends all children that nobody waits for."""
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    @contextmanager
    def _one(self) -> Iterator[Examiner]:
        examiner = self._idle.get()
        try:
            yield examiner
        finally:
            self._idle.put(examiner)


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


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
    child.wait()
