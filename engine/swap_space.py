"""The books of the host's memory for KV of preempted requests. Knows no torch, and no blocks of the pool's own but the
ids that it is given.

    save:     pool blocks   p0 p1 p2    OUT -->   host blocks   h4 h7 h9        (the request loses p0 p1 p2 afterwards)
    restore:  pool blocks   s0 q1 q2    <-- IN    host blocks      h7 h9        (s0 was found in the prefix cache)

All that is computed of a request is saved, also blocks that it shares: whoever shares them may be gone when it comes
back. All or nothing: with too little room it is computed again, and its blocks are not even in part here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.block_moves import BlockMove, Route
from engine.block_pool import BlockPool, blocks_for
from kvtransfer.codec import RequestKey
from kvtransfer.worker_facts import SwapLoad


@dataclass(frozen=True)
class _Saved:
    """The KV of a request's first `num_tokens` tokens."""

    block_ids: Sequence[int]
    num_tokens: int


class SwapSpace:
    """Keeps what preempted requests have computed, and can prove its own books (`check_integrity`)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Blocks of the pool's own size, in tokens."""
        self._pool = BlockPool(num_blocks, block_size)
        self._saved: dict[RequestKey, _Saved] = {}
        self._num_out = self._num_in = self._num_refused = 0

    def load(self) -> SwapLoad:
        """What the next heartbeat says of it."""
        pool = self._pool
        return SwapLoad(pool.num_blocks, pool.num_free, self._num_out, self._num_in, self._num_refused)

    def save(self, key: RequestKey, block_ids: Sequence[int], num_tokens: int) -> list[BlockMove]:
        """Keeps the first `num_tokens` tokens of a request that has `block_ids`; no moves if there is no room."""
        assert key not in self._saved, key
        if not self._pool.can_fit(num_tokens):
            self._num_refused += 1
            return []
        host_ids = self._pool.allocate(num_tokens, owner=key)
        self._saved[key] = _Saved(host_ids, num_tokens)
        self._num_out += len(host_ids)
        held = block_ids[: blocks_for(num_tokens, self._pool.block_size)]
        return [BlockMove(Route.OUT, *pair) for pair in zip(held, host_ids, strict=True)]

    def restore(self, key: RequestKey, block_ids: Sequence[int], num_present: int) -> tuple[int, list[BlockMove]]:
        """Tokens that the request has in `block_ids` after the moves. `num_present`: those that are there already, in
        full blocks. Nothing is kept of it here any more."""
        saved = self._saved.get(key)
        if saved is None:
            return num_present, []
        self.drop(key)
        first = num_present // self._pool.block_size
        pairs = list(zip(saved.block_ids, block_ids, strict=False))[first:]
        self._num_in += len(pairs)
        return max(num_present, saved.num_tokens), [BlockMove(Route.IN, *pair) for pair in pairs]

    def drop(self, key: RequestKey) -> None:
        """Forgets what is kept of a request, if anything is."""
        saved = self._saved.pop(key, None)
        if saved is not None:
            self._pool.free(saved.block_ids, owner=key)

    def check_integrity(self, preempted: Iterable[RequestKey]) -> None:
        """Asserts that only requests which have lost their blocks have some here, and that all blocks are accounted."""
        strangers = self._saved.keys() - set(preempted)
        assert not strangers, f"KV of {strangers} is kept, who have blocks of their own, or are gone"
        self._pool.check_integrity((key, saved.block_ids) for key, saved in self._saved.items())
