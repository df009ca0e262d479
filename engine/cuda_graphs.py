"""CUDA graphs of decode steps: a step is recorded once for each batch size, and replayed with one call.

A decode step has hundreds of small launches, which at small batches take the host longer than the device. A graph has
its shapes and addresses fixed, so batches are padded to the next recorded size, in tensors that stay where they are:

    rows    | r0 | r1 | r2 |  padding   |      padding: token 0 at position 0, one token of context,
            0             count       size              its K and V in the scratch block, which no request owns

A kernel that is to be recorded takes lengths from the device (`Kernels.capturable`): the host's are an upper bound.
Prompt chunks, and batches beyond the largest size, run eagerly.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from engine.batch import Batch
from engine.block_pool import blocks_for
from engine.kv_cache import KvCache
from kernels.face import RaggedRows

Forward = Callable[[Batch], torch.Tensor]
"""A decode batch to its logits [S, vocab_size]."""
Replay = Callable[[], torch.Tensor]
Record = Callable[[Callable[[], torch.Tensor]], Replay]
"""Turns a computation on fixed tensors into one that can be repeated; its result lies in a fixed tensor too."""

LARGEST_SIZE: Final = 512
"""Of a recorded batch: above it the device takes longer than the host."""
_STEPS: Final = ((8, 64), (32, LARGEST_SIZE))
"""(step, up to): sizes grow in steps of 8 up to 64, and of 32 from there, so that padding wastes little."""


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes to record, ascending; the last one takes `max_num_seqs` rows, if that is not above LARGEST_SIZE."""
    largest = min(max_num_seqs, LARGEST_SIZE)
    sizes = {1, 2, 4, largest}
    low = 0
    for step, high in _STEPS:
        sizes.update(range(low + step, high + 1, step))
        low = high
    return tuple(sorted(size for size in sizes if size <= largest))


def size_for(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the ascending `sizes` that holds `count` rows, None if none does."""
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True)
class GraphLimits:
    """What recorded steps must have room for."""

    max_num_seqs: int
    max_model_len: int


class FixedRows:
    """The tensors that all recorded sizes read: a graph of n rows uses the first n of each."""

    def __init__(self, limits: GraphLimits, kv_cache: KvCache) -> None:
        size = batch_sizes(limits.max_num_seqs)[-1]
        device, self._max_model_len = kv_cache.device, limits.max_model_len
        self._scratch_block = kv_cache.scratch_block
        self._scratch_slot = kv_cache.scratch_block * kv_cache.block_size
        width = blocks_for(limits.max_model_len, kv_cache.block_size)
        self._counter = torch.arange(size + 1, device=device)
        self._query_start = self._counter.to(torch.int32)
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((size,), self._scratch_slot, dtype=torch.int64, device=device)
        self._context_lens = torch.ones(size, dtype=torch.int32, device=device)
        self._tables = torch.full((size, width), self._scratch_block, dtype=torch.int32, device=device)

    def batch(self, size: int) -> Batch:
        """The first `size` rows as a batch. Its host lengths are the largest that there can be."""
        rows = RaggedRows(
            query_start=self._query_start[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[:size],
            host_query_lens=(1,) * size,
            host_context_lens=(self._max_model_len,) * size,
        )
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slot_mapping[:size],
            decode=rows,
            prefill=None,
            sample_tokens=self._counter[:size],
            sample_rows=tuple(range(size)),
            all_sample=True,
        )

    def load(self, batch: Batch, size: int) -> None:
        """Puts a decode batch into the first rows, and padding behind it up to `size`. Waits for nothing."""
        assert batch.decode is not None
        tables = batch.decode.block_tables
        count, width = tables.shape
        for fixed, rows, padding in (
            (self._token_ids, batch.token_ids, 0),
            (self._positions, batch.positions, 0),
            (self._slot_mapping, batch.slot_mapping, self._scratch_slot),
            (self._context_lens, batch.decode.context_lens, 1),
        ):
            fixed[:count] = rows
            fixed[count:size] = padding
        self._tables[:count, :width] = tables
        self._tables[count:size, 0] = self._scratch_block


class DecodeGraphs:
    """Recorded decode steps over one KV pool, which must have a scratch block."""

    def __init__(self, forward: Forward, kv_cache: KvCache, limits: GraphLimits, record: Record) -> None:
        """Records all sizes, the largest first: the others find room in the memory that it has taken."""
        self.sizes = batch_sizes(limits.max_num_seqs)
        with torch.inference_mode():
            self._rows = FixedRows(limits, kv_cache)
            self._replays = {size: record(self._step(forward, size)) for size in reversed(self.sizes)}

    def _step(self, forward: Forward, size: int) -> Callable[[], torch.Tensor]:
        batch = self._rows.batch(size)
        return lambda: forward(batch)

    def takes(self, batch: Batch) -> bool:
        """Whether a recorded size can do this step."""
        return batch.prefill is None and batch.num_decode <= self.sizes[-1]

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [S, vocab_size] of the batch's `sample_tokens`, good until the next run."""
        size = size_for(batch.num_decode, self.sizes)
        assert size is not None, batch.num_decode
        with torch.inference_mode():
            self._rows.load(batch, size)
            return self._replays[size]()[batch.sample_tokens]


class GraphRecorder:
    """A `Record` for a CUDA device. All its graphs share one memory pool, since one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> Replay:
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, step: Callable[[], torch.Tensor]) -> None:
        """Compiles kernels and makes handles of libraries, neither of which can be recorded. On a stream of its own,
        as recording is."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
