"""What workers probably have in their prefix caches: a guess from what this gateway has sent them.

A worker is not asked: that would cost each request a round trip, and its cache may have changed by then. A guess that
is wrong costs time, never a token: a worker computes whatever it does not have. So names need not be those of the
workers. They chain as theirs do, because KV depends on all tokens before it:

    root = hash(salt)        name[i] = hash(name[i - 1], token ids of block i)        full blocks only

Each worker's shelf is bounded and forgets what was used longest ago, and of one prompt the end first, as workers do.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from gateway.worker import Worker, WorkerRef

MAX_BLOCKS: Final = 1 << 15
"""Most blocks that are remembered of a worker, and named of a request."""


class BlockChain:
    """Names of the full blocks of one request's tokens, each computed once for each block size."""

    def __init__(self, salt: str = "") -> None:
        self._root = hash(salt)
        self._names: dict[int, list[int]] = {}

    def of(self, block_size: int, tokens: Sequence[int]) -> Sequence[int]:
        """Names of the full blocks of `tokens`, which is the same sequence at each call, or a longer or shorter one."""
        names = self._names.setdefault(block_size, [])
        num_full = min(len(tokens) // block_size, MAX_BLOCKS)
        for index in range(len(names), num_full):
            parent = names[-1] if names else self._root
            names.append(hash((parent, *tokens[index * block_size : (index + 1) * block_size])))
        return names[:num_full]


class Shelf:
    """Block names of one worker, the one used last at the end."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def num_held(self, names: Sequence[int]) -> int:
        """How many of `names` are here, from the first on without a gap."""
        return next((index for index, name in enumerate(names) if name not in self._names), len(names))

    def put(self, names: Sequence[int]) -> None:
        for name in reversed(names):  # a beginning is of use without its end, not the other way round
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._max_blocks:
            self._names.popitem(last=False)

    def remove(self, names: Sequence[int]) -> None:
        for name in names:
            self._names.pop(name, None)


class HeldPrefixes:
    """A shelf for each start of a worker that shares prefixes."""

    def __init__(self) -> None:
        self._shelves: dict[WorkerRef, Shelf] = {}

    def __len__(self) -> int:
        """Workers that something is remembered of."""
        return len(self._shelves)

    def meet(self, worker: Worker) -> None:
        """From now on it is remembered what this worker holds."""
        if worker.hello.shares_prefixes and worker.ref not in self._shelves:
            block_size = worker.hello.layout.block_size
            self._shelves[worker.ref] = Shelf(block_size, min(MAX_BLOCKS, worker.limits.kv_tokens // block_size))

    def forget(self, ref: WorkerRef) -> None:
        """The worker is gone; also if it was never met."""
        self._shelves.pop(ref, None)

    def forget_all(self) -> None:
        """The workers' caches were emptied."""
        self._shelves.clear()

    def note(self, ref: WorkerRef, chain: BlockChain, tokens: Sequence[int]) -> None:
        """The worker has the KV of all of `tokens`."""
        if (shelf := self._shelves.get(ref)) is not None:
            shelf.put(chain.of(shelf.block_size, tokens))

    def correct(self, ref: WorkerRef, chain: BlockChain, tokens: Sequence[int], num_cached: int) -> None:
        """The worker says that it has the KV of the first `num_cached` of `tokens` and no more."""
        if (shelf := self._shelves.get(ref)) is not None:
            shelf.remove(chain.of(shelf.block_size, tokens)[num_cached // shelf.block_size :])

    def num_held(self, ref: WorkerRef, chain: BlockChain, tokens: Sequence[int]) -> int:
        """Tokens at the beginning of `tokens` whose KV the worker probably has. The last one never counts: it is
        computed whatever is held, because its logits are needed."""
        shelf = self._shelves.get(ref)
        if shelf is None or len(shelf) == 0:  # before anything is named, which takes its time
            return 0
        return shelf.num_held(chain.of(shelf.block_size, tokens[:-1])) * shelf.block_size
