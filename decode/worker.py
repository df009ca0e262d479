"""A decode worker: takes KV from prefill workers and keeps many requests generating in one continuous batch.

1. A request comes from a gateway, is checked and queued until prefill offers its KV and blocks for its prompt can be
   reserved.
2. The receiver takes its KV straight into those blocks, off the step loop. A request without a prefill worker has its
   prompt computed here instead, in chunks beside the others' tokens.
3. With the KV complete and the first token here, it takes part in each step, and takes further blocks as it needs them,
   until a stop rule ends it.
4. Each step's tokens go out in one message a gateway.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from decode.scheduler import CloseReception, DecodeJob, DecodeScheduler, ExpectOffer, GrantKv, ReceptionCommand
from engine.assembly import Engine
from engine.buffers import from_bytes
from engine.grammar_door import GrammarDoor
from engine.kv_cache import dtype_named
from engine.request import ScheduledRow, StepResult
from engine.role import EngineRole
from engine.wire_fp8 import dequantise
from kvtransfer.codec import RequestKey
from kvtransfer.faults import Witness, unwatched
from kvtransfer.incoming import KvOffered, ReceptionEnded
from kvtransfer.kv_messages import KvHeader
from kvtransfer.layout import FP8, KvBody
from kvtransfer.messages import DecodeRequest, RequestMessage
from kvtransfer.receiver import KvReceiver
from kvtransfer.request_parts import LifetimeEvent
from kvtransfer.worker import TransferEvent
from kvtransfer.worker_facts import KvTraffic

logger = logging.getLogger(__name__)


class PoolSink:
    """Writes KV into the pool for the receiver's thread. A request's blocks stay put until its reception has ended."""

    def __init__(self, engine: Engine, scheduler: DecodeScheduler) -> None:
        self._kv_cache = engine.kv_cache
        self._scheduler = scheduler
        self._dtype = dtype_named(engine.layout.dtype)

    def splice(self, key: RequestKey, header: KvHeader, body: KvBody) -> None:
        """Copies K and V, each [layers, tokens, heads, head_dim], into the request's own blocks."""
        job = self._scheduler.find(key)
        assert job is not None, f"{key} was freed while its KV was being written"
        job.witness(key, LifetimeEvent.FIRST_FRAME)  # the scheduler hears of it when all is here
        shape = (header.num_rows, header.head_stop - header.head_start, self._kv_cache.layout.head_dim)
        if header.dtype == FP8:
            k, v = (dequantise(part, shape, self._dtype) for part in (body.k, body.v))
        else:
            k, v = (from_bytes(part, self._dtype, shape) for part in (body.k, body.v))
        where = header.layer, job.block_ids, header.start, header.stop
        self._kv_cache.splice(*where, k, v, header.head_start, header.num_layers)

    def finish(self, key: RequestKey) -> None:
        """Waits until a GPU has all of it; a CPU has it already."""
        if self._kv_cache.device.type == "cuda":
            torch.cuda.current_stream(self._kv_cache.device).synchronize()


class DecodeRole(EngineRole[DecodeJob, ReceptionCommand]):
    """The decode side of `kvtransfer.worker.WorkerRole`."""

    def __init__(
        self,
        engine: Engine,
        scheduler: DecodeScheduler,
        receiver: KvReceiver,
        clock: Callable[[], float] = time.monotonic,
        witness: Witness = unwatched,
        door: GrammarDoor[DecodeJob] | None = None,
    ) -> None:
        super().__init__(engine, scheduler, holds_output=True, clock=clock, witness=witness, door=door)
        self._scheduler = scheduler
        self._receiver = receiver

    def start(self) -> None:
        self._receiver.start()

    def stop(self) -> None:
        super().stop()
        self._receiver.stop()

    def is_alive(self) -> bool:
        return self._receiver.is_alive()

    def add(self, gateway: str, message: RequestMessage, now: float) -> None:
        if not isinstance(message, DecodeRequest):
            logger.error("gateway %s sent a %s to a decode worker", gateway, type(message).__name__)
            return
        if self._can_serve(gateway, message):
            source = message.source
            peer = None if source is None else (source.worker_id, source.generation)
            jobs = [DecodeJob(spec=spec, gateway=gateway, peer=peer, witness=self._witness) for spec in message.specs]
            self._let_in(jobs, now)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        match event:
            case KvOffered():
                self._scheduler.offered(event, now)
            case ReceptionEnded():
                self._scheduler.reception_ended(event, now)
            case _:
                raise AssertionError(event)

    def _kv_traffic(self) -> KvTraffic:
        return self._receiver.traffic

    def _compute(self, rows: Sequence[ScheduledRow]) -> StepResult:
        self._engine.kv_cache.copy_blocks(self._scheduler.take_copies())
        return self._engine.runner.step(rows)

    def _carry_out(self, command: ReceptionCommand) -> None:
        match command:
            case ExpectOffer(job):
                assert job.peer is not None, job.key
                self._receiver.expect(job.key, job.peer, job.num_prefill)
            case GrantKv(job):
                self._receiver.grant(job.key, first_token=job.num_cached)
            case CloseReception(key, reason):
                self._receiver.close(key, reason)
