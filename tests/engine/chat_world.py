"""Many chats at once through both roles in one process: real schedulers, runners and pools, KV that is copied late.

What is answered must not depend on the size of the pools, on what they share, or on what becomes of the preempted.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from decode.scheduler import DecodeJob, DecodeLimits, DecodeScheduler
from engine.block_mover import HostBlocks
from engine.block_pool import BlockPool
from engine.queue_rules import QueueRules
from engine.request import RequestState
from engine.swap_space import SwapSpace
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import RequestSpec
from kvtransfer.worker_facts import Load
from prefill.scheduler import OpenTransfer, PrefillJob, PrefillLimits, PrefillScheduler
from tests.engine.two_roles import tiny_engine

CHUNK_TOKENS, MAX_SEQS, PATIENCE_S = 24, 4, 1e9
TARGET, PEER = DecodeTarget("decode-0", "g1", "tcp://127.0.0.1:9"), ("prefill-0", "g1")
MOST_STEPS = 2000
MOST_DELAYED = 4
"""Steps that the KV of a prompt lies with prefill, computed and not fetched."""


@dataclass(frozen=True)
class PoolSizes:
    """Blocks of 16 tokens on prefill and of 8 on decode, and of 8 on the host of decode."""

    prefill: int
    decode: int
    swap: int = 0


@dataclass(frozen=True)
class Turn:
    """What one user says, computed by decode alone or by both."""

    spec: RequestSpec
    local: bool


class ChatWorld:
    """Two engines; each `serve` has pools, schedulers and caches of its own that live as long as it does."""

    def __init__(self, model: Path) -> None:
        self.prefill, self.decode = tiny_engine(model, 16), tiny_engine(model, 8)

    def serve(self, sizes: PoolSizes, *, share_prefixes: bool) -> "Service":
        for engine in (self.prefill, self.decode):
            engine.kv_cache.fill(float("nan"))
        return Service(self, sizes, share_prefixes)


class Service:
    """A prefill and a decode worker that serve one round of turns after another."""

    def __init__(self, world: ChatWorld, sizes: PoolSizes, share_prefixes: bool) -> None:
        self._world, eos, length = world, world.prefill.eos_token_ids, world.decode.max_model_len
        rules = QueueRules(64, share_prefixes)
        limits = DecodeLimits(CHUNK_TOKENS, MAX_SEQS, length, PATIENCE_S, PATIENCE_S, PATIENCE_S)
        swap = SwapSpace(sizes.swap, 8) if sizes.swap else None
        self._mover = HostBlocks(world.decode.kv_cache, sizes.swap)
        self._prefill = PrefillScheduler(
            BlockPool(sizes.prefill, 16), rules, PrefillLimits(CHUNK_TOKENS, MAX_SEQS, length, PATIENCE_S), eos
        )
        self._decode = DecodeScheduler(BlockPool(sizes.decode, 8), rules, limits, eos, swap)
        self._ready: dict[str, int] = {}  # steps since both were ready
        self._dice = random.Random(0)

    @property
    def loads(self) -> tuple[Load, Load]:
        """Of prefill and decode."""
        return self._prefill.load(), self._decode.load()

    def round(self, turns: Sequence[Turn]) -> dict[str, list[int]]:
        """All of them at once; the answers by request id. Both workers are empty afterwards, but for their caches."""
        sources = {turn.spec.request_id: self._source(turn.spec) for turn in turns if not turn.local}
        jobs = {}
        for turn in turns:
            peer = None if turn.local else PEER
            jobs[turn.spec.request_id] = job = DecodeJob(spec=turn.spec, gateway="test", peer=peer)
            self._decode.add(job, 0.0)
        for _ in range(MOST_STEPS):
            self._step(sources, jobs)
            if not len(self._prefill) and not len(self._decode):
                break
        for load in self.loads:
            assert (load.kv_usage, load.num_running, load.num_waiting) == (0.0, 0, 0)
        first_was_last = {name: source.output_token_ids for name, source in sources.items()}
        return {name: job.output_token_ids or first_was_last[name] for name, job in jobs.items()}

    def _source(self, spec: RequestSpec) -> PrefillJob:
        job = PrefillJob(spec=spec, gateway="test", target=TARGET)
        self._prefill.add(job, 0.0)
        return job

    def _step(self, sources: Mapping[str, PrefillJob], jobs: Mapping[str, DecodeJob]) -> None:
        rows = self._prefill.schedule(0.0)
        for command in self._prefill.take_commands():
            if isinstance(command, OpenTransfer):
                self._decode.offered(KvOffered(command.request.key), 0.0)
        if rows:
            self._prefill.complete(rows, self._world.prefill.runner.step(rows), 0.0)
        for name, source in sources.items():
            self._hand_over(name, source, jobs[name])
        rows = self._decode.schedule(0.0)
        self._mover.carry_out(self._decode.take_moves())
        if rows:
            self._decode.complete(rows, self._world.decode.runner.step(rows), 0.0)
        for scheduler in (self._prefill, self._decode):
            scheduler.check_integrity()
            scheduler.take_outputs()
        self._decode.take_commands()  # what is granted shows in the states

    def _hand_over(self, name: str, source: PrefillJob, job: DecodeJob) -> None:
        """Late, so that others want its blocks meanwhile."""
        if source.state is RequestState.CLOSING:  # the first token was the last, and there is no one to tell but us
            self._prefill.transfer_ended(TransferEnded(source.key, TransferOutcome.ABORTED), 0.0)
            self._decode.cancel(job.key, 0.0)
            self._decode.reception_ended(ReceptionEnded(job.key, ReceptionOutcome.CLOSED, None), 0.0)
        elif source.state is RequestState.HANDING_OVER and job.state is RequestState.RECEIVING:
            waited = self._ready[name] = self._ready.get(name, 0) + 1
            if waited > self._dice.randint(0, MOST_DELAYED):
                self._fetch(source, job)

    def _fetch(self, source: PrefillJob, job: DecodeJob) -> None:
        start, stop = job.num_cached, job.num_prefill
        for layer in range(self._world.prefill.layout.num_layers if start < stop else 0):
            key, value = self._world.prefill.kv_cache.gather(layer, source.block_ids, start, stop)
            self._world.decode.kv_cache.splice(layer, job.block_ids, start, stop, key, value)
        self._prefill.transfer_ended(TransferEnded(source.key, TransferOutcome.DONE), 0.0)
        first = source.output_token_ids[-1]
        self._decode.reception_ended(ReceptionEnded(job.key, ReceptionOutcome.ARRIVED, first), 0.0)
