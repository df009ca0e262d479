"""What one round of the transfer benchmark moves: requests of equal length over a paged pool, one frame a layer.

Both processes make the same load from the same arguments. The blocks of a request lie scattered over the pool, and
differently on the two sides, as they do in a server that has run for a while.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from engine.block_pool import blocks_for
from engine.buffers import as_bytes
from engine.kv_cache import KvCache
from kernels.face import Kernels
from kvtransfer.layout import head_bytes
from kvtransfer.messages import KvLayout
from kvtransfer.outgoing import Piece

HEADER_BYTES: Final = 120
"""About what an encoded KvHeader takes: the bare loops send as many."""


@dataclass(frozen=True)
class Load:
    """`requests` requests of `tokens` tokens. Every layer of a request is one message: a header, K, and V."""

    layout: KvLayout
    tokens: int
    requests: int

    @property
    def frame_bytes(self) -> int:
        """Of K or V in one message."""
        return self.tokens * self.layout.num_kv_heads * head_bytes(self.layout, self.layout.dtype)

    @property
    def num_messages(self) -> int:
        return self.requests * self.layout.num_layers

    @property
    def num_bytes(self) -> int:
        """K and V of a round."""
        return 2 * self.frame_bytes * self.num_messages

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """(request, layer's tokens), in the order in which they are sent."""
        for request in range(self.requests):
            for layer in range(self.layout.num_layers):
                yield request, Piece(layer, 0, self.tokens)


class LoadPool:
    """The pool of one side, and which blocks belong to which request."""

    def __init__(self, load: Load, kernels: Kernels, seed: int) -> None:
        per_request = blocks_for(load.tokens, load.layout.block_size)
        self._load = load
        self.kv_cache = KvCache(load.layout, load.requests * per_request, kernels, torch.device("cpu"))
        self.kv_cache.fill(0.0)  # a page that was never written costs a fault at its first use
        blocks = list(range(load.requests * per_request))
        random.Random(seed).shuffle(blocks)
        self.block_ids = [blocks[first : first + per_request] for first in range(0, len(blocks), per_request)]

    def fill(self, seed: int) -> None:
        """Makes every layer's K and V numbers of their own."""
        generator = torch.Generator().manual_seed(seed)
        for layer in range(self._load.layout.num_layers):
            for pool in self.kv_cache.layer(layer):
                pool.normal_(generator=generator)

    def gather(self, request: int, piece: Piece) -> tuple[memoryview, memoryview]:
        """K and V of one layer of a request, each a copy in one piece of memory."""
        k, v = self.kv_cache.gather(piece.layer, self.block_ids[request], piece.start, piece.stop)
        return as_bytes(k), as_bytes(v)

    def checksum(self) -> int:
        """Over all that a round moves, in its order: equal on both sides once all has arrived."""
        total = 0
        for request, piece in self._load.pieces():
            for part in self.gather(request, piece):
                total = zlib.crc32(part, total)
        return total
