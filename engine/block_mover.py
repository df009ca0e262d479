"""Moves whole blocks between the pool and the host's memory.

On a CPU a move is a copy, done at once. On a GPU the host's blocks are pinned, and moves are a lane's work: the lane
waits for what the computation has been asked so far, and the next forward waits for the lane; this thread waits
for neither before the step is over:

    computation   | step n |  (waits)            | step n + 1 |
                           ^ mark                ^
    lane                   | out h4 h7 | in h2   | recorded
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from engine.block_moves import BlockMove, Route
from engine.cuda_lane import CudaLane
from engine.errors import CapacityError
from engine.kv_cache import GIB, KvCache, bytes_per_block
from engine.staging import Lane

logger = logging.getLogger(__name__)


class HostBlocks:
    """`engine.block_moves.BlockMover`: a pool's second home, block by block [num_layers, 2, block_size, num_kv_heads,
    head_dim] of the pool's dtype, each of them contiguous so that it moves in one piece."""

    def __init__(self, kv_cache: KvCache, num_blocks: int, lane: Lane | None = None) -> None:
        """`num_blocks`: may be 0. `lane`: on a GPU; torch rounds pinned memory up to a power of two. Raises
        CapacityError if the host can't give the memory."""
        self.num_blocks = num_blocks
        self._kv_cache = kv_cache
        self._lane = lane
        self._last: Any = None
        block = kv_cache.block(0)
        try:
            self._blocks = torch.empty((num_blocks, *block.shape), dtype=block.dtype, pin_memory=lane is not None)
        except RuntimeError as error:
            wanted = num_blocks * bytes_per_block(kv_cache.layout) / GIB
            raise CapacityError(f"the host has no {wanted:.2f} GiB for KV blocks: lower --swap-space") from error

    def carry_out(self, moves: Sequence[BlockMove]) -> None:
        """In order; the next forward on the current stream comes after all of them."""
        if self._lane is None:
            self._move_all(moves)
            return
        mark = self._lane.mark()
        with self._lane.active():
            self._lane.follow(mark)
            self._move_all(moves)
            self._last = self._lane.record()
        self._lane.hold_back(self._last)

    def settle(self) -> None:
        """Returns when all moves are done."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def _move_all(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            match move.route:
                case Route.OUT:
                    source, target = self._kv_cache.block(move.source), self._blocks[move.target]
                case Route.IN:
                    source, target = self._blocks[move.source], self._kv_cache.block(move.target)
            target.copy_(source, non_blocking=True)


def allocate_host_blocks(kv_cache: KvCache, size_gib: float) -> HostBlocks:
    """As many blocks as `size_gib` pays for; none for 0. Raises CapacityError if it does not pay for one."""
    per_block = bytes_per_block(kv_cache.layout)
    num_blocks = int(size_gib * GIB) // per_block
    if size_gib and not num_blocks:
        raise CapacityError(
            f"--swap-space of {size_gib:g} GiB does not hold one KV block, of {per_block / GIB:.4f} GiB: raise it, or "
            "lower --block-size"
        )
    if num_blocks:
        logger.info("swap space: %d blocks of KV in the host's memory (%.1f GiB)", num_blocks, size_gib)
    return HostBlocks(kv_cache, num_blocks, CudaLane(kv_cache.device) if kv_cache.device.type == "cuda" else None)
