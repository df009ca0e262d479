"""Writes KV into a GPU's pool beside the computation. `decode.worker.PoolSink` is its slow twin."""

from typing import Final

import torch

from decode.scheduler import DecodeScheduler
from engine.assembly import Engine
from engine.kv_cache import dtype_named
from engine.staging import BufferRing, Lane
from engine.wire_fp8 import unpack
from kvtransfer.codec import RequestKey
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvHeader
from kvtransfer.layout import FP8, KvBody
from kvtransfer.request_parts import LifetimeEvent

NUM_BUFFERS: Final = 16
"""Bodies that the lane may be behind the socket."""


class StagedSink:
    """`kvtransfer.intake.KvSink` over a lane, for the receiver's thread."""

    def __init__(self, engine: Engine, scheduler: DecodeScheduler, lane: Lane) -> None:
        self._kv_cache = engine.kv_cache
        self._scheduler = scheduler
        self._dtype = dtype_named(engine.layout.dtype)
        self._lane = lane
        self._ring = BufferRing(lane, NUM_BUFFERS, MAX_BODY_BYTES)

    def splice(self, key: RequestKey, header: KvHeader, body: KvBody) -> None:
        """Copies K and V, each [layers, tokens, heads, head_dim], into the request's own blocks, some time until
        `finish`."""
        job = self._scheduler.find(key)
        assert job is not None, f"{key} was freed while its KV was being written"
        job.witness(key, LifetimeEvent.FIRST_FRAME)
        k, v = (self._to_device(part, header) for part in (body.k, body.v))
        with self._lane.active():
            where = header.layer, job.block_ids, header.start, header.stop
            self._kv_cache.splice(*where, k, v, header.head_start, header.num_layers)

    def _to_device(self, part: memoryview, header: KvHeader) -> torch.Tensor:
        host = self._ring.fill(part)
        with self._lane.active():
            packed = host.to(self._kv_cache.device, non_blocking=True, copy=True)
            self._ring.used()
            shape = (header.num_rows, header.head_stop - header.head_start, self._kv_cache.layout.head_dim)
            if header.dtype == FP8:
                return unpack(packed, shape, self._dtype)
            return packed.view(self._dtype).reshape(shape)

    def finish(self, key: RequestKey) -> None:
        """Waits until the lane is done with all of it: the next step may read it from any stream."""
        self._lane.record().synchronize()
