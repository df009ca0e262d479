"""A prefill worker: computes prompts in chunks and ships their KV while later chunks are still being computed.

1. A request comes from a gateway, is checked, and queued. With blocks for its prompt it is offered to its decode
   worker.
2. Each step computes a batch of chunks; after each layer the sender is told how far the layer's KV has got.
3. The first token goes to the gateway at once, and to decode behind the KV.
4. When decode has it all, or the request ends otherwise, its blocks are free again.
"""

import logging
import time
from collections.abc import Callable, Sequence

from engine.assembly import Engine
from engine.buffers import as_bytes
from engine.grammar_door import GrammarDoor
from engine.request import ScheduledRow, StepResult
from engine.role import EngineRole
from engine.wire_fp8 import quantise
from kvtransfer.codec import RequestKey
from kvtransfer.faults import Witness, unwatched
from kvtransfer.layout import FP8, KvBody
from kvtransfer.messages import PrefillRequest, RequestMessage
from kvtransfer.outgoing import Piece, TransferEnded
from kvtransfer.sender import KvSender
from kvtransfer.worker import TransferEvent
from kvtransfer.worker_facts import KvTraffic
from prefill.scheduler import (
    AbortTransfer,
    OpenTransfer,
    PrefillJob,
    PrefillScheduler,
    SendFirstToken,
    TransferCommand,
)

logger = logging.getLogger(__name__)


class PoolSource:
    """Reads KV out of the pool for the sender's thread. A request's blocks stay put until its transfer has ended."""

    def __init__(self, engine: Engine, scheduler: PrefillScheduler) -> None:
        self._kv_cache = engine.kv_cache
        self._scheduler = scheduler

    def gather(self, key: RequestKey, piece: Piece) -> KvBody:
        """K and V of the piece's layers and tokens, each [layers, tokens, num_kv_heads, head_dim] in its dtype."""
        job = self._scheduler.find(key)
        assert job is not None, f"{key} was freed while its KV was being read"
        k, v = self._kv_cache.gather(piece.layer, job.block_ids, piece.start, piece.stop, piece.num_layers)
        if piece.dtype is None:
            return KvBody(as_bytes(k), as_bytes(v))
        assert piece.dtype == FP8, piece.dtype
        return KvBody(quantise(k), quantise(v))


class PrefillRole(EngineRole[PrefillJob, TransferCommand]):
    """The prefill side of `kvtransfer.worker.WorkerRole`."""

    def __init__(
        self,
        engine: Engine,
        scheduler: PrefillScheduler,
        sender: KvSender,
        clock: Callable[[], float] = time.monotonic,
        mark_layer: Callable[[int], None] | None = None,
        witness: Witness = unwatched,
        door: GrammarDoor[PrefillJob] | None = None,
    ) -> None:
        """`mark_layer` is told of each layer of each step, before the sender is."""
        super().__init__(engine, scheduler, holds_output=False, clock=clock, witness=witness, door=door)
        self._mark_layer = mark_layer
        self._scheduler = scheduler
        self._sender = sender

    def start(self) -> None:
        self._sender.start()

    def stop(self) -> None:
        super().stop()
        self._sender.stop()

    def is_alive(self) -> bool:
        return self._sender.is_alive()

    def add(self, gateway: str, message: RequestMessage, now: float) -> None:
        if not isinstance(message, PrefillRequest):
            logger.error("gateway %s sent a %s to a prefill worker", gateway, type(message).__name__)
            return
        if self._can_serve(gateway, message):
            jobs = [
                PrefillJob(spec=spec, gateway=gateway, target=message.target, witness=self._witness)
                for spec in message.specs
            ]
            self._let_in(jobs, now)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        assert isinstance(event, TransferEnded), event
        self._scheduler.transfer_ended(event, now)

    def _kv_traffic(self) -> KvTraffic:
        return self._sender.traffic

    def _compute(self, rows: Sequence[ScheduledRow]) -> StepResult:
        return self._engine.runner.step(rows, on_layer=self._announcer(rows))

    def _announcer(self, rows: Sequence[ScheduledRow]) -> Callable[[int], None]:
        """Called after each layer of a step: tells the sender how far that layer's KV has got."""
        stops = [
            (row.request.key, row.stop) for row in rows if isinstance(row.request, PrefillJob) and row.request.lent
        ]
        return lambda layer: self._announce(layer, stops)

    def _announce(self, layer: int, stops: Sequence[tuple[RequestKey, int]]) -> None:
        if self._mark_layer is not None:
            self._mark_layer(layer)
        self._sender.ready(layer, stops)

    def _carry_out(self, command: TransferCommand) -> None:
        match command:
            case OpenTransfer(job):
                assert job.target is not None, job.key
                self._sender.open(job.key, job.target, job.num_prefill)
            case SendFirstToken(key, token_id, logprob, siblings):
                self._sender.first_token(key, token_id, logprob, siblings)
            case AbortTransfer(key, reason, tell_peer):
                self._sender.abort(key, reason, tell_peer=tell_peer)
