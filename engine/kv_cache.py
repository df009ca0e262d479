"""The tensors of a paged KV pool: K and V of every layer, by block. Knows no requests; who owns a block is BlockPool's.

    layer i, K (and V alike):   [num_blocks, block_size, num_kv_heads, head_dim]

`gather` and `splice` speak tokens, layers and heads, so two pools with different block sizes can exchange KV.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from engine.batch import slots_of
from engine.block_pool import blocks_for
from engine.errors import CapacityError
from kernels.face import Kernels, KvScales
from kvtransfer.worker_facts import KvLayout

GIB = 1 << 30
FLOAT8: Final = "float8_e4m3fn"
"""The dtype of a pool that keeps numbers in one byte, with scales."""
SLOTS_KEPT: Final = 64
"""Token ranges whose slots are remembered: pieces of several requests take turns within a layer."""


def bytes_per_block(layout: KvLayout) -> int:
    """Bytes of one block over all layers, K and V together."""
    itemsize = dtype_named(layout.dtype).itemsize
    return 2 * layout.num_layers * layout.block_size * layout.num_kv_heads * layout.head_dim * itemsize


def dtype_named(name: str) -> torch.dtype:
    """torch.bfloat16 for "bfloat16"."""
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _untouched(layout: KvLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], not written to. Raises CapacityError."""
    shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
    try:
        return torch.empty(shape, dtype=dtype_named(layout.dtype), device=device)
    except RuntimeError as error:
        wanted = num_blocks * bytes_per_block(layout) / GIB
        raise CapacityError(
            f"{device} has no {wanted:.2f} GiB for {num_blocks} KV blocks: "
            "lower --kv-cache-gib (CPU) or --gpu-memory-utilization (GPU)"
        ) from error


class KvCache:
    """Allocates the pool and moves token ranges in and out of it. Memory is not touched before it is written."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        kernels: Kernels,
        device: torch.device,
        *,
        scales: Sequence[KvScales] | None = None,
        with_scratch: bool = False,
    ) -> None:
        """`scales`: of each layer, for float8 and nothing else. `with_scratch`: one block more, behind the others, that
        padding rows write to. Raises CapacityError if the device cannot give the memory."""
        assert num_blocks > 0, num_blocks
        assert (scales is not None) == (layout.dtype == FLOAT8), layout.dtype
        assert scales is None or len(scales) == layout.num_layers, (scales, layout.num_layers)
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._with_scratch = with_scratch
        self._kernels = kernels
        self._scales = scales
        self._pool = _untouched(layout, num_blocks + with_scratch, device)
        self._slots_of = functools.lru_cache(SLOTS_KEPT)(self._make_slots)
        self._bytes = self._pool.view(torch.uint8)  # not every device copies float8
        # Made once: taking views of a tensor costs microseconds, and a step needs all of them.
        self._layers = [(layer[0], layer[1]) for layer in self._pool]
        self._pools_of = functools.lru_cache(SLOTS_KEPT)(self._make_pools)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def scratch_block(self) -> int:
        """The block that nobody owns."""
        assert self._with_scratch, "this pool was made without a scratch block"
        return self.num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens that fit the whole pool."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * bytes_per_block(self.layout)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [num_blocks, block_size, num_kv_heads, head_dim] (and the scratch block behind
        those, if there is one); views of the pool."""
        return self._layers[index]

    def block(self, block_id: int) -> torch.Tensor:
        """All of one block, [num_layers, 2, block_size, num_kv_heads, head_dim]; a view of the pool, in as many pieces
        as there are layers, times two."""
        return self._pool[:, :, block_id]

    def scales(self, index: int) -> KvScales | None:
        """Of one layer, for the kernels that read and write it; None where numbers are stored as they are."""
        return None if self._scales is None else self._scales[index]

    def fill(self, value: float) -> None:
        """Overwrites every slot, for instance with NaN to prove that unused ones are never read."""
        self._pool.fill_(value)

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Gives each block that is a key the contents of its value, K and V of all layers. All are read before any is
        written."""
        if not copies:
            return
        targets, sources = (torch.tensor(list(blocks)).to(self.device) for blocks in (copies, copies.values()))
        self._bytes[:, :, targets] = self._bytes[:, :, sources]

    def gather(
        self, layer: int, block_ids: Sequence[int], start: int, stop: int, num_layers: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request's tokens [start, stop) in layers [layer, layer + num_layers), contiguous copies
        [num_layers * (stop - start), num_kv_heads, head_dim].

        `block_ids`: all blocks of the request, in the order of its tokens; the range may start inside one.
        """
        slots = self._slots(block_ids, start, stop, num_layers)
        return self._kernels.gather_kv(*self._pools(layer, num_layers), slots)

    def splice(
        self,
        layer: int,
        block_ids: Sequence[int],
        start: int,
        stop: int,
        key: torch.Tensor,
        value: torch.Tensor,
        head_start: int = 0,
        num_layers: int = 1,
    ) -> None:
        """Writes K and V [num_layers * (stop - start), heads, head_dim] of the pool's dtype, from any device, to a
        request's tokens [start, stop) and KV heads [head_start, head_start + heads) in layers
        [layer, layer + num_layers). The reverse of `gather`."""
        heads = key.shape[1]
        assert head_start + heads <= self.layout.num_kv_heads, (head_start, heads, self.layout.num_kv_heads)
        shape = (num_layers * (stop - start), heads, self.layout.head_dim)
        assert key.shape == value.shape == shape, (key.shape, value.shape, shape)
        assert key.dtype == value.dtype == self._pool.dtype, (key.dtype, value.dtype, self._pool.dtype)
        slots = self._slots(block_ids, start, stop, num_layers)
        key, value = key.to(self.device), value.to(self.device)
        self._kernels.splice_kv(*self._pools(layer, num_layers), slots, key, value, head_start)

    def _pools(self, layer: int, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `layer`; for several layers, all that lies between the first one's K (or V) and the last one's,
        as if it were the pool of one layer."""
        return self._layers[layer] if num_layers == 1 else self._pools_of(layer, num_layers)

    def _make_pools(self, layer: int, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert 0 < num_layers <= self.layout.num_layers - layer, (layer, num_layers, self.layout.num_layers)
        halves = self._pool.flatten(0, 1)[2 * layer : 2 * (layer + num_layers)]
        return halves[:-1].flatten(0, 1), halves[1:].flatten(0, 1)

    def _slots(self, block_ids: Sequence[int], start: int, stop: int, num_layers: int) -> torch.Tensor:
        """The same tokens move layer after layer, so their slots are kept: they cost more than the copy of a few."""
        size = self.block_size
        room = len(block_ids) * size
        assert 0 <= start < stop <= room, f"tokens [{start}, {stop}) of a request with blocks for {room}"
        first = start // size
        blocks = tuple(block_ids[first : blocks_for(stop, size)])
        return self._slots_of(blocks, start - first * size, stop - start, num_layers)

    def _make_slots(self, block_ids: tuple[int, ...], start: int, num_tokens: int, num_layers: int) -> torch.Tensor:
        """Of several layers: [num_layers * num_tokens], a layer's K as far from the next one's as it is in memory."""
        slots = slots_of(block_ids, start, start + num_tokens, self.block_size)
        firsts = torch.arange(num_layers) * (2 * self._pool.shape[2] * self.block_size)
        return (firsts[:, None] + slots).reshape(-1).to(self.device)
