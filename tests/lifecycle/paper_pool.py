"""A KV pool on paper: each slot holds the tokens that its KV was computed from, so that a wrong or stale one shows."""

from engine.block_moves import Route
from engine.block_pool import BlockPool


class PaperPool:
    """The KV of a token is the tuple of all tokens up to it."""

    def __init__(self, block_size: int, books: BlockPool | None = None) -> None:
        """`books`: who owns which block, so that nobody writes to a block of several."""
        self._block_size = block_size
        self._books = books
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self._host: dict[tuple[int, int], tuple[int, ...]] = {}

    def carry_out(self, moves) -> None:
        """What the engine does before a step."""
        for move in moves:
            there, here = (self._slots, self._host) if move.route is Route.OUT else (self._host, self._slots)
            for offset in range(self._block_size):
                here[move.target, offset] = there.get((move.source, offset), ())

    def write(self, job, start: int, stop: int) -> None:
        """Computes, or takes over, the tokens [start, stop) of `job`; all before them must be right."""
        self.check(job, start)
        for token in range(start, stop):
            block_id = self._slot(job, token)[0]
            assert self._books is None or not self._books.is_shared(block_id), f"{job.key} writes to others' {block_id}"
            self._slots[self._slot(job, token)] = tuple(job.token_slice(0, token + 1))

    def copy(self, copies: dict[int, int]) -> None:
        """What the scheduler asks for before a step: all is read before anything is written."""
        found = {
            (target, offset): self._slots.get((source, offset))
            for target, source in copies.items()
            for offset in range(self._block_size)
        }
        self._slots |= {slot: kv for slot, kv in found.items() if kv is not None}

    def check(self, job, stop: int) -> None:
        """The tokens [0, stop) of `job` are what its blocks hold."""
        for token in range(stop):
            found = self._slots.get(self._slot(job, token))
            assert found == tuple(job.token_slice(0, token + 1)), f"{job.key}: token {token} has the KV of {found}"

    def _slot(self, job, token: int) -> tuple[int, int]:
        return job.block_ids[token // self._block_size], token % self._block_size
