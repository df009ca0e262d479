"""What one round of the transfer benchmark moves: requests of equal length over a paged pool.

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
from kvtransfer.outgoing import Piece
from kvtransfer.worker_facts import KvLayout

HEADER_BYTES: Final = 120
"""About what an encoded KvHeader takes: the bare loops send as many."""


def layer_bytes(layout: KvLayout, tokens: int) -> int:
    """Of K or V of so many tokens in one layer."""
    return tokens * layout.num_kv_heads * head_bytes(layout, layout.dtype)


@dataclass(frozen=True)
class Load:
    """`requests` requests of `tokens` tokens. A message is a header, K, and V of `together` layers of a request; of
    fewer, where the layers end."""

    layout: KvLayout
    tokens: int
    requests: int
    together: int = 1

    @property
    def frame_bytes(self) -> int:
        """Of K or V in one message."""
        return self.together * layer_bytes(self.layout, self.tokens)

    def bytes_of(self, piece: Piece) -> int:
        """Of K or V in the message that brings `piece`."""
        return piece.num_layers * layer_bytes(self.layout, self.tokens)

    @property
    def num_messages(self) -> int:
        return self.requests * -(-self.layout.num_layers // self.together)

    @property
    def num_bytes(self) -> int:
        """K and V of a round."""
        return 2 * layer_bytes(self.layout, self.tokens) * self.requests * self.layout.num_layers

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """(request, its next layers' tokens), in the order in which they are sent."""
        for request in range(self.requests):
            for layer in range(0, self.layout.num_layers, self.together):
                num_layers = min(self.together, self.layout.num_layers - layer)
                yield request, Piece(layer, 0, self.tokens, num_layers=num_layers)


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
        """K and V of some layers of a request, each a copy in one piece of memory."""
        where = piece.layer, self.block_ids[request], piece.start, piece.stop
        k, v = self.kv_cache.gather(*where, piece.num_layers)
        return as_bytes(k), as_bytes(v)

    def checksum(self) -> int:
        """Over all that a round moves, in its order: equal on both sides once all has arrived."""
        total = 0
        for request, piece in self._load.pieces():
            for part in self.gather(request, piece):
                total = zlib.crc32(part, total)
        return total
