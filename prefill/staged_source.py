"""Reads KV out of a GPU's pool beside the computation. `prefill.worker.PoolSource` is its slow twin."""

from typing import Any, Final

import torch

from engine.assembly import Engine
from engine.staging import Lane, LentBuffers
from engine.wire_fp8 import pack
from kvtransfer.codec import RequestKey
from kvtransfer.kv_messages import MAX_BODY_BYTES
from kvtransfer.layout import FP8, KvBody
from kvtransfer.outgoing import Piece
from prefill.scheduler import PrefillScheduler

NUM_BUFFERS: Final = 16
"""Bodies on their way to a socket before more host memory is taken."""


class StagedSource:
    """`kvtransfer.send_machine.KvSource` over a lane. `mark_layer` is for the computation's thread, the rest for the
    sender's."""

    def __init__(self, engine: Engine, scheduler: PrefillScheduler, lane: Lane) -> None:
        self._kv_cache = engine.kv_cache
        self._scheduler = scheduler
        self._lane = lane
        self._buffers = LentBuffers(lane, NUM_BUFFERS, MAX_BODY_BYTES)
        self._marks: dict[int, Any] = {}

    def mark_layer(self, layer: int) -> None:
        """The KV of `layer` for the tokens of this step has been asked of the computation. A later mark covers an
        earlier one, so the last of each layer is enough."""
        self._marks[layer] = self._lane.mark()

    def gather(self, key: RequestKey, piece: Piece) -> KvBody:
        """K and V of the piece's layers and tokens, each [layers, tokens, num_kv_heads, head_dim] in its dtype."""
        job = self._scheduler.find(key)
        assert job is not None, f"{key} was freed while its KV was being read"
        with self._lane.active():
            for layer in range(piece.layer, piece.layer + piece.num_layers):
                self._lane.follow(self._marks[layer])
            parts = self._kv_cache.gather(piece.layer, job.block_ids, piece.start, piece.stop, piece.num_layers)
            k, v = (self._to_host(part, piece.dtype) for part in parts)
            done = self._lane.record()
        done.synchronize()
        return KvBody(k, v)

    def _to_host(self, part: torch.Tensor, dtype: str | None) -> memoryview:
        assert dtype in (None, FP8), dtype
        packed = part.reshape(-1).view(torch.uint8) if dtype is None else pack(part)
        host = self._buffers.lend(len(packed))
        torch.frombuffer(host, dtype=torch.uint8).copy_(packed, non_blocking=True)
        return host
