"""One side of the transfer benchmark at work: its sending end here, its receiving end in a process of its own."""

import subprocess
import sys
import time

import msgspec

from experiments.bare_ends import Copies
from experiments.transfer_ends import BenchError
from experiments.transfer_load import Load, LoadPool
from experiments.transfer_sides import SIDES


class Pair:
    """Runs rounds, one after another. Raises BenchError if the other process fails."""

    def __init__(self, name: str, load: Load, pool: LoadPool) -> None:
        self._side, self._pool = SIDES[name], pool
        self._child = subprocess.Popen(
            [sys.executable, "-m", "experiments.transfer_child", name, msgspec.json.encode(load).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._end = self._side.sending_end(load, pool, self._hear())
        self._num_rounds = 0

    def run(self) -> float:
        """Seconds from the first byte offered until the other side's word that it has all."""
        self._num_rounds += 1
        self._say(f"round {self._num_rounds}")
        self._expect("go")
        start = time.perf_counter()
        self._end.send_round(self._num_rounds)
        took = time.perf_counter() - start
        self._expect("done")
        return took

    def check(self) -> None:
        """Compares the two pools, if this side moves the pool's tokens at all."""
        if self._side.copies is Copies.BOTH:
            self._say("checksum")
            self._expect(str(self._pool.checksum()))

    def close(self) -> None:
        self._end.close()
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)
        self._child.stdout.close()

    def _say(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _hear(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise BenchError("the receiving process has ended: see its last words above")
        return line.strip()

    def _expect(self, wanted: str) -> None:
        heard = self._hear()
        if heard != wanted:
            raise BenchError(f"the receiving process said {heard!r}, expected {wanted!r}")
