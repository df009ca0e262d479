"""Stands for `engine.assembly.Engine`: real block books over a pool that holds digests, and a runner that reads them.

Nothing is ever cleared: a block that is handed out anew still holds what its former owner put there, as in a real pool,
so KV that did not come is found as KV of somebody else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.block_moves import BlockMove, Route
from engine.block_pool import BlockPool
from engine.request import Request, RowLogprobs, ScheduledRow, StepResult
from kvtransfer.worker_facts import Fingerprint, KvLayout
from tests.simulation.errors import require
from tests.simulation.model import EOS, HALF, VOCAB_SIZE, HashModel

FINGERPRINT = Fingerprint(architecture="Hash", config="c", weights="w", dtype="float32", vocab_size=VOCAB_SIZE)


def layout_of(num_layers: int, block_size: int) -> KvLayout:
    """One KV head of 2 float32: 8 bytes each of K and V."""
    return KvLayout(num_layers=num_layers, num_kv_heads=1, head_dim=HALF // 4, dtype="float32", block_size=block_size)


class HashKvCache:
    """Stands for `engine.kv_cache.KvCache`; `books` say who may touch what."""

    def __init__(self, layout: KvLayout, books: "WatchedPool") -> None:
        self.layout = layout
        self._books = books
        self.num_copied = 0
        self._slots: list[list[bytes]] = [[b""] * self.num_tokens for _ in range(layout.num_layers)]

    @property
    def num_tokens(self) -> int:
        return self._books.num_blocks * self._books.block_size

    def write(self, request: Request, layer: int, start: int, entries: Sequence[bytes]) -> None:
        """Tokens from `start` on; into blocks of this request and of no other."""
        slots, size = self._slots[layer], self._books.block_size
        for block in request.block_ids[start // size : (start + len(entries) - 1) // size + 1]:
            owners = self._books.owners_of(block)
            require(len(owners) == 1, request.key, "writes to block", block, "of", owners)
        for slot, entry in zip(self._own_slots(request, start, start + len(entries)), entries, strict=True):
            slots[slot] = entry

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """All layers at once; what is read is read before anything is written."""
        size = self._books.block_size
        self.num_copied += len(copies)
        for slots in self._slots:
            contents = {target: slots[source * size : (source + 1) * size] for target, source in copies.items()}
            for target, content in contents.items():
                slots[target * size : (target + 1) * size] = content

    def read(self, request: Request, layer: int, start: int, stop: int) -> list[bytes]:
        slots = self._slots[layer]
        return [slots[slot] for slot in self._own_slots(request, start, stop)]

    def contents(self, block: int) -> list[list[bytes]]:
        """Of each layer."""
        return [slots[self._span(block)] for slots in self._slots]

    def replace(self, block: int, contents: Sequence[Sequence[bytes]]) -> None:
        for slots, entries in zip(self._slots, contents, strict=True):
            slots[self._span(block)] = entries

    def _span(self, block: int) -> slice:
        size = self._books.block_size
        return slice(block * size, (block + 1) * size)

    def _own_slots(self, request: Request, start: int, stop: int) -> list[int]:
        size, blocks = self._books.block_size, request.block_ids
        require(stop <= len(blocks) * size, request.key, "tokens up to", stop, "with", len(blocks), "blocks of", size)
        for block in blocks[start // size : (stop - 1) // size + 1]:
            require(request.key in self._books.owners_of(block), request.key, "touches block", block, "of another")
        return [blocks[token // size] * size + token % size for token in range(start, stop)]


class HashMover:
    """Stands for `engine.block_mover.HostBlocks`. Nothing is cleared here either."""

    def __init__(self, kv_cache: HashKvCache, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._kv_cache = kv_cache
        self._contents = [kv_cache.contents(0)] * num_blocks

    def carry_out(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            match move.route:
                case Route.OUT:
                    self._contents[move.target] = self._kv_cache.contents(move.source)
                case Route.IN:
                    self._kv_cache.replace(move.target, self._contents[move.source])

    def settle(self) -> None:
        pass


class HashRunner:
    """Stands for `engine.runner.Runner`. `elsewhere` lets the worker's other threads run in the middle of a step."""

    def __init__(self, model: HashModel, kv_cache: HashKvCache, elsewhere: Callable[[], None]) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._elsewhere = elsewhere

    def step(self, rows: Sequence[ScheduledRow], on_layer: Callable[[int], None] | None = None) -> StepResult:
        require(rows, "a step of no rows")
        digests = [self._model.digests(row.request.token_slice(0, row.stop)) for row in rows]
        for layer in range(self._model.num_layers):
            for row, found in zip(rows, digests, strict=True):
                if row.count:
                    self._layer(row, layer, found)
            if on_layer is not None:
                on_layer(layer)
            self._elsewhere()
        sampled = [
            self._model.next_token(found[-1], row.request.sampling) if row.samples else None
            for row, found in zip(rows, digests, strict=True)
        ]
        told = [self._told(*parts) for parts in zip(rows, digests, sampled, strict=True)]
        return StepResult(sampled, {index: likely for index, likely in enumerate(told) if likely != RowLogprobs()})

    def _told(self, row: ScheduledRow, digests: Sequence[bytes], token_id: int | None) -> RowLogprobs:
        request, likelihood = row.request, self._model.likelihood
        is_asked = token_id is not None and request.sampling.num_logprobs is not None
        prompt = [likelihood(digests[place], request.prompt_token_ids[place + 1]) for place in row.scored]
        return RowLogprobs(likelihood(digests[-1], token_id) if is_asked else None, tuple(prompt))

    def _layer(self, row: ScheduledRow, layer: int, digests: Sequence[bytes]) -> None:
        """Attention reads all that was before, and adds its own."""
        entries = [self._model.entry(layer, digest) for digest in digests]
        if row.start and self._kv_cache.read(row.request, layer, 0, row.start) != entries[: row.start]:
            self._report_stale(row, layer, entries)
        self._kv_cache.write(row.request, layer, row.start, entries[row.start :])

    def _report_stale(self, row: ScheduledRow, layer: int, entries: Sequence[bytes]) -> None:
        found = self._kv_cache.read(row.request, layer, 0, row.start)
        wrong = [token for token in range(row.start) if found[token] != entries[token]]
        require(False, row.request.key, "reads wrong KV in layer", layer, "at tokens", wrong)


@dataclass(frozen=True)
class _Loaded:
    fingerprint: Fingerprint = FINGERPRINT
    eos_token_ids: frozenset[int] = frozenset({EOS})


@dataclass(frozen=True)
class HashEngine:
    """What the roles ask of an engine."""

    kv_cache: HashKvCache
    pool: BlockPool
    runner: HashRunner
    mover: HashMover
    max_model_len: int
    loaded: _Loaded = _Loaded()

    @property
    def layout(self) -> KvLayout:
        return self.kv_cache.layout

    @property
    def fingerprint(self) -> Fingerprint:
        return self.loaded.fingerprint

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.loaded.eos_token_ids


class WatchedPool(BlockPool):
    """The real books, which can be asked."""

    def owners_of(self, block_id: int) -> Sequence[object]:
        return self._owners.get(block_id, ())


def make_engine(
    model: HashModel,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    elsewhere: Callable[[], None],
    swap_blocks: int = 0,
) -> HashEngine:
    pool = WatchedPool(num_blocks, block_size)
    kv_cache = HashKvCache(layout_of(model.num_layers, block_size), pool)
    mover = HashMover(kv_cache, swap_blocks)
    return HashEngine(kv_cache, pool, HashRunner(model, kv_cache, elsewhere), mover, max_model_len)
