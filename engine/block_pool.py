"""Hands out the blocks of a paged KV pool, and shares those whose contents are known. Knows block ids, names of
contents and owners; no request states, no tensors.

A block is in one of three states, and its name (see `engine/prefix_hash.py`) outlives its last owner:

               allocate                     free (last owner)
    free  -------------------->  owned  ----------------------->  free, unnamed: contents are nobody's
      ^                           | ^                       `-->  free, named: a later prompt may `share` it
      |        its turn comes     | | share: one owner more              |
      +---------------------------+-+------------------------------------+

The order of the free queue is the order of eviction: unnamed blocks are handed out first, then named ones, least
recently used first. A sequence's blocks are freed from the end, so that the tail of a prefix goes before its head.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from engine.errors import OutOfBlocksError
from engine.prefix_hash import BlockName


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass
class CacheCounts:
    """What the prefix cache did so far: tokens looked up, tokens found, blocks whose contents had to make room."""

    num_queried: int = 0
    num_hit: int = 0
    num_evicted: int = 0


class BlockPool:
    """Allocates, shares and frees blocks, and can prove its own books (`check_integrity`)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counts = CacheCounts()
        self._unnamed: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._named: OrderedDict[int, None] = OrderedDict()
        self._owners: dict[int, list[Hashable]] = {}
        self._name_of: dict[int, BlockName] = {}
        self._block_of: dict[BlockName, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, named ones included."""
        return len(self._unnamed) + len(self._named)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def can_fit(self, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Whether `num_tokens` fit the blocks that are free now, the first of them in the blocks `shared`."""
        wanted = blocks_for(num_tokens, self.block_size) - len(shared)
        return wanted <= self.num_free - sum(1 for block_id in shared if block_id not in self._owners)

    def is_shared(self, block_id: int) -> bool:
        """Whether an owned block has several owners."""
        return len(self._owners[block_id]) > 1

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return len(self._owners)

    # --- taking and giving back

    def allocate(self, num_tokens: int, owner: Hashable) -> list[int]:
        """Blocks for `num_tokens` tokens, in the order of the tokens. Raises OutOfBlocksError, and then takes none."""
        count = blocks_for(num_tokens, self.block_size)
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        block_ids = [self._take() for _ in range(count)]
        for block_id in block_ids:
            self._owners[block_id] = [owner]
        return block_ids

    def share(self, block_ids: Sequence[int], owner: Hashable) -> None:
        """Makes `owner` one more owner of blocks that `find` has just named, or that somebody owns."""
        for block_id in block_ids:
            if block_id not in self._owners:
                assert block_id in self._named, f"block {block_id} has no contents to share"
                del self._named[block_id]
            self._owners.setdefault(block_id, []).append(owner)

    def free(self, block_ids: Sequence[int], owner: Hashable) -> None:
        """Takes back blocks of a sequence, given in the order of its tokens, that `owner` holds."""
        for block_id in reversed(block_ids):
            holders = self._owners.get(block_id, [])
            assert owner in holders, f"block {block_id} freed by {owner!r}, owned by {holders!r}"
            holders.remove(owner)
            if not holders:
                del self._owners[block_id]
                (self._named if block_id in self._name_of else self._unnamed)[block_id] = None

    def _take(self) -> int:
        if self._unnamed:
            return self._unnamed.popitem(last=False)[0]
        block_id, _ = self._named.popitem(last=False)
        self._forget(block_id)
        self.counts.num_evicted += 1
        return block_id

    # --- contents

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """The blocks that hold the longest known prefix of `names`. Owned or not, they stay until the next call that
        changes the pool: take them with `share` first."""
        found: list[int] = []
        for name in names:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def note_lookup(self, num_queried: int, num_hit: int) -> None:
        """Books one admitted sequence: tokens that were looked up, and tokens found."""
        self.counts.num_queried += num_queried
        self.counts.num_hit += num_hit

    def name(self, block_id: int, name: BlockName) -> None:
        """Says what an owned block holds, once all of its tokens' KV is in it. Of equal blocks the first is shared."""
        assert block_id in self._owners, f"block {block_id} was named by nobody who owns it"
        if name in self._block_of or block_id in self._name_of:
            return
        self._name_of[block_id], self._block_of[name] = name, block_id

    def forget_names(self) -> None:
        """Empties the prefix cache: nothing that is in the pool now will be shared again."""
        for block_id in list(self._named):
            self._forget(block_id)
            del self._named[block_id]
            self._unnamed[block_id] = None
        for block_id in list(self._name_of):
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        del self._block_of[self._name_of.pop(block_id)]

    # --- proof

    def check_integrity(self, held: Iterable[tuple[Hashable, Iterable[int]]]) -> None:
        """Asserts that `held`, all (owner, block ids) in the worker, and the free queues make up the pool exactly."""
        books = sorted((block_id, repr(owner)) for owner, block_ids in held for block_id in block_ids)
        known = sorted((block_id, repr(owner)) for block_id, owners in self._owners.items() for owner in owners)
        assert books == known, f"held {books} but the pool's books say {known}"
        places = [*self._unnamed, *self._named, *self._owners]
        assert sorted(places) == list(range(self.num_blocks)), f"a block is lost, or in two places: {sorted(places)}"
        assert self._named.keys() <= self._name_of.keys(), "a free block is kept for contents without a name"
        assert not self._unnamed.keys() & self._name_of.keys(), "a name for contents that are nobody's"
        assert self._block_of == {name: block_id for block_id, name in self._name_of.items()}, "names disagree"
