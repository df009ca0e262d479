"""Compiles grammars that nobody has seen yet in a process of its own, which may be lost.

A schema of forty characters can take the library minutes, gigabytes, or its stack, whatever limits it is given. So a
grammar is compiled first where that harms nobody:

    this process --Outfit, Grammar, Grammar, ...--> stdin of the child: compiles each, with a limit on CPU time
                 <--READY, Verdict, Verdict, ...--- stdout               and one on memory

A child that passes a limit is killed by the kernel, and the grammar that it had is refused. One that takes too long
by the clock, because it is stopped or the machine is overloaded, is killed here; one that somebody else kills is
replaced once. Neither is a verdict on the grammar. A child ends with its parent, by the end of its stdin, or at the
latest at its limit.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from grammar.child import Child, ChildLostError, Death
from grammar.errors import CostError, GrammarError, UndecidedError
from kvtransfer.request_parts import Grammar

CPU_SECONDS: Final = 2.0
"""For one grammar. Ordinary ones take milliseconds."""
WALL_SECONDS: Final = 20.0
"""By the clock, for one grammar with all that comes before it: children that start, or are lost. A child that computes
reaches its limit of CPU time before, unless it gets less than a tenth of a core; and a client is told before its
gateway stops waiting, after 30 s."""
MEMORY_BYTES: Final = 2 << 30
"""Address space of the child, of which 0.5 GiB are its own."""
READY: Final = b"ready"


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
        self._child: Child | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # a child that starts is ended by `close`, or is not started

    def examine(self, grammar: Grammar) -> Grammar:
        """`grammar` as workers take it. Raises GrammarError; RuntimeError if there can be no child."""
        try:
            answer = self._answer(msgspec.msgpack.encode(grammar), time.monotonic() + WALL_SECONDS)
        except ChildLostError as error:
            raise _fault_of(error.death) from error
        verdict = msgspec.msgpack.decode(answer, type=Verdict)
        if verdict.fault is not None:
            raise (CostError if verdict.is_costly else GrammarError)(verdict.fault)
        return msgspec.structs.replace(grammar, text=verdict.text)

    def close(self) -> None:
        """Ends the child, if there is one, and starts no other. From any thread; who waits for a verdict gets none."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.end()

    def _answer(self, frame: bytes, deadline: float) -> bytes:
        """That of a child; of another one if somebody has killed the first, which says little of what it had."""
        try:
            return self._ready_child(deadline).ask(frame, _until(deadline))
        except ChildLostError as error:
            if error.death is not Death.FOREIGN:
                raise
        return self._ready_child(deadline).ask(frame, _until(deadline))

    def _ready_child(self, deadline: float) -> Child:
        if self._child is not None and self._child.is_running:
            return self._child
        outfit = msgspec.msgpack.encode(self._outfit())
        child = self._start()
        try:
            answer = child.ask(outfit, _until(deadline))
        except ChildLostError as error:
            if error.death is not Death.EXCESS:
                raise
            raise RuntimeError("the process that examines grammars does not start") from error
        assert answer == READY, answer
        return child

    def _start(self) -> Child:
        with self._lock:
            if self._is_closed:
                raise UndecidedError("the process that examines grammars has been told to end")
            self._child = Child("grammar.examination")
            return self._child


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
        """Ends all children, at once; who waits for a verdict gets none."""
        for examiner in self._all:
            examiner.close()

    @contextmanager
    def _one(self) -> Iterator[Examiner]:
        examiner = self._idle.get()
        try:
            yield examiner
        finally:
            self._idle.put(examiner)


def _until(deadline: float) -> float:
    return deadline - time.monotonic()


def _fault_of(death: Death) -> GrammarError:
    """What the death of a child says of the grammar that it had."""
    match death:
        case Death.EXCESS:
            return CostError(f"it takes more than {CPU_SECONDS:g} s or too much memory to compile")
        case Death.OVERDUE:
            return UndecidedError(f"it was not compiled within {WALL_SECONDS:g} s, which may be the machine's fault")
        case Death.FOREIGN:
            return UndecidedError("the process that compiled it was killed, perhaps as the machine is short of memory")
