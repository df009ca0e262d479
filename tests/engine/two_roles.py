"""Prefill and decode in one process, each a real scheduler around a runner and a pool of its own. No sockets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decode.scheduler import DecodeJob, DecodeLimits, DecodeScheduler
from engine.assembly import Engine, assemble
from engine.block_mover import HostBlocks
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.queue_rules import QueueRules
from engine.request import RequestState
from engine.swap_space import SwapSpace
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import Drawn, EndReason, RequestSpec
from kvtransfer.worker_facts import Load
from prefill.scheduler import PrefillJob, PrefillLimits, PrefillScheduler

LEASE_S = 10.0
CHUNK_TOKENS = 16


@dataclass(frozen=True)
class Generated:
    """New tokens of one attempt, and why they end."""

    token_ids: list[int]
    reason: EndReason


@dataclass(frozen=True)
class Together:
    """Output tokens of requests that ran together, and what it took."""

    token_ids: list[list[int]]
    load: Load

    @property
    def num_preemptions(self) -> int:
        return self.load.num_preemptions

    @property
    def num_cached(self) -> int:
        return self.load.prefix_hits


class TwoRoles:
    """Runs one request after the other, each from prefill to its end on decode."""

    def __init__(self, model: Path, *, prefill_block: int = 16, decode_block: int = 8) -> None:
        self._prefill = tiny_engine(model, prefill_block)
        self._decode = tiny_engine(model, decode_block)
        self._eos = self._prefill.eos_token_ids

    def run(self, spec: RequestSpec) -> Generated:
        """One attempt; both pools are empty before and after."""
        prefill = PrefillScheduler(
            self._prefill.pool,
            QueueRules(1),
            PrefillLimits(CHUNK_TOKENS, 1, self._prefill.max_model_len, LEASE_S),
            self._eos,
        )
        job = PrefillJob(spec=spec, gateway="test", target=DecodeTarget("decode-0", "g1", "tcp://127.0.0.1:9"))
        prefill.add(job, 0.0)
        words = self._run_to_its_first_token(prefill)
        if words[-1].end is None:
            words += self._run_on_decode(spec, job)
        prefill.transfer_ended(TransferEnded(job.key, TransferOutcome.DONE), 0.0)
        for engine in (self._prefill, self._decode):
            engine.pool.check_integrity([])
        token_ids = [token for word in words for token in word.token_ids]
        return Generated(token_ids, words[-1].end.reason)

    def _run_to_its_first_token(self, prefill: PrefillScheduler) -> list:
        words: list = []
        while not words:
            rows = prefill.schedule(0.0)
            prefill.complete(rows, self._prefill.runner.step(rows), 0.0)
            words = [item.output for item in prefill.take_outputs()]
        return words

    def _run_on_decode(self, spec: RequestSpec, source: PrefillJob) -> list:
        limits = DecodeLimits(CHUNK_TOKENS, 1, self._decode.max_model_len, LEASE_S, LEASE_S, LEASE_S)
        decode = DecodeScheduler(self._decode.pool, QueueRules(1), limits, self._eos)
        job = DecodeJob(spec=spec, gateway="test", peer=("prefill-0", "g1"))
        decode.add(job, 0.0)
        decode.offered(KvOffered(job.key), 0.0)
        self._copy_kv(source, job)
        first = source.output_token_ids[-1]
        decode.reception_ended(ReceptionEnded(job.key, ReceptionOutcome.ARRIVED, first), 0.0)
        job.num_reported += 1  # prefill has said the first token
        while rows := decode.schedule(0.0):
            decode.complete(rows, self._decode.runner.step(rows), 0.0)
        return [item.output for item in decode.take_outputs()]

    def run_together(
        self, specs: Sequence[RequestSpec], num_blocks: int, *, share_prefixes: bool = True, swap_blocks: int = 0
    ) -> Together:
        """All of `specs` at once over a decode pool of `num_blocks`; three at most, each as soon as there is room. What
        is preempted goes to `swap_blocks` on the host, as far as there is room."""
        limits = DecodeLimits(CHUNK_TOKENS, 3, self._decode.max_model_len, LEASE_S, LEASE_S, LEASE_S)
        pool = BlockPool(num_blocks, self._decode.pool.block_size)
        swap = SwapSpace(swap_blocks, pool.block_size) if swap_blocks else None
        mover = HostBlocks(self._decode.kv_cache, swap_blocks)
        decode = DecodeScheduler(pool, QueueRules(len(specs), share_prefixes), limits, self._eos, swap)
        jobs = [DecodeJob(spec=spec, gateway="test", peer=("prefill-0", "g1")) for spec in specs]
        for job in jobs:
            decode.add(job, 0.0)
            decode.offered(KvOffered(job.key), 0.0)
        while len(decode):
            for job in [job for job in jobs if job.state is RequestState.RECEIVING]:
                self._arrive(decode, job)
            rows = decode.schedule(0.0)
            mover.carry_out(decode.take_moves())
            if rows:
                decode.complete(rows, self._decode.runner.step(rows), 0.0)
            decode.check_integrity()
        load = decode.load()
        assert (load.kv_usage, load.swap.num_free) == (0.0, swap_blocks)
        return Together([job.output_token_ids for job in jobs], load)

    def run_group(self, specs: Sequence[RequestSpec], num_blocks: int, *, local: bool = False) -> Together:
        """`specs`, choices of one prompt, over a decode pool of `num_blocks`; `local`: prefill has no part."""
        num = len(specs)
        limits = DecodeLimits(CHUNK_TOKENS, num, self._decode.max_model_len, LEASE_S, LEASE_S, LEASE_S)
        pool = BlockPool(num_blocks, self._decode.pool.block_size)
        decode = DecodeScheduler(pool, QueueRules(num), limits, self._eos)
        peer = None if local else ("prefill-0", "g1")
        leader, *followers = jobs = [DecodeJob(spec=spec, gateway="test", peer=peer) for spec in specs]
        decode.add(leader, 0.0, followers)
        if not local:
            decode.offered(KvOffered(leader.key), 0.0)
            self._arrive(decode, leader)
        while rows := decode.schedule(0.0):
            self._decode.kv_cache.copy_blocks(decode.take_copies())
            decode.complete(rows, self._decode.runner.step(rows), 0.0)
            pool.check_integrity(decode.held_blocks())
        assert len(decode) == 0
        return Together([job.output_token_ids for job in jobs], decode.load())

    def _arrive(self, decode: DecodeScheduler, job: DecodeJob) -> None:
        """Computes the job's prompt on the prefill engine, alone, and hands it over with the first tokens of all that
        follow it."""
        limits = PrefillLimits(CHUNK_TOKENS, job.num_members, self._prefill.max_model_len, LEASE_S)
        prefill = PrefillScheduler(self._prefill.pool, QueueRules(1, share_prefixes=False), limits, self._eos)
        target = DecodeTarget("decode-0", "g1", "tcp://127.0.0.1:9")
        specs = [job.spec, *(follower.spec for follower in job.followers)]
        source, *followers = [PrefillJob(spec=spec, gateway="test", target=target) for spec in specs]
        prefill.add(source, 0.0, followers)
        self._run_to_its_first_token(prefill)
        self._copy_kv(source, job, job.num_cached)
        prefill.transfer_ended(TransferEnded(source.key, TransferOutcome.DONE), 0.0)
        first = source.output_token_ids[-1]
        siblings = {follower.spec.request_id: Drawn(follower.output_token_ids[-1]) for follower in followers}
        arrived = ReceptionEnded(job.key, ReceptionOutcome.ARRIVED, first, siblings=siblings)
        decode.reception_ended(arrived, 0.0)

    def _copy_kv(self, source: PrefillJob, target: DecodeJob, start: int = 0) -> None:
        if start == target.num_prefill:
            return
        for layer in range(self._prefill.layout.num_layers):
            key, value = self._prefill.kv_cache.gather(layer, source.block_ids, start, source.num_prefill)
            self._decode.kv_cache.splice(layer, target.block_ids, start, target.num_prefill, key, value)


def tiny_engine(model: Path, block_size: int) -> Engine:
    """A CPU engine in float32 over a pool of 0.01 GiB."""
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", block_size=block_size, kv_cache_gib=0.01)
    return assemble(config, model, CHUNK_TOKENS)
