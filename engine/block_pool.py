"""Hands out the blocks of a paged KV pool. Knows block ids and owners; no request states, no tensors.

    block ids   0    1    2    3    4   ...   num_blocks - 1
                free owned owned free owned

A freed block goes to the end of the free queue, so the block that has been free for longest is handed out first.
"""

from collections import deque
from collections.abc import Hashable, Iterable

from engine.errors import OutOfBlocksError


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Allocates and frees blocks, and can prove its own books (`check_integrity`)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._owner: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def can_fit(self, num_tokens: int) -> bool:
        """Whether `num_tokens` fit the blocks that are free now."""
        return blocks_for(num_tokens, self.block_size) <= self.num_free

    def allocate(self, num_tokens: int, owner: Hashable) -> list[int]:
        """Blocks for `num_tokens` tokens, in the order of the tokens. Raises OutOfBlocksError, and then takes none."""
        count = blocks_for(num_tokens, self.block_size)
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        block_ids = [self._free.popleft() for _ in range(count)]
        self._owner.update(dict.fromkeys(block_ids, owner))
        return block_ids

    def free(self, block_ids: Iterable[int], owner: Hashable) -> None:
        """Takes back blocks that `owner` holds."""
        for block_id in block_ids:
            holder = self._owner.pop(block_id, None)
            assert holder == owner, f"block {block_id} freed by {owner!r}, owned by {holder!r}"
            self._free.append(block_id)

    def check_integrity(self, held: Iterable[tuple[Hashable, Iterable[int]]]) -> None:
        """Asserts that `held`, all (owner, block ids) in the worker, and the free queue make up the pool exactly."""
        books = {block_id: owner for owner, block_ids in held for block_id in block_ids}
        assert books == self._owner, f"held {books} but the pool's books say {self._owner}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free queue"
        assert not free & books.keys(), f"blocks both free and owned: {sorted(free & books.keys())}"
        assert len(free) + len(books) == self.num_blocks, (len(free), len(books), self.num_blocks)
