"""Puts a worker's engine together from its settings: model, KV pool, block books, runner; and says who it is."""

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.block_mover import HostBlocks, allocate_host_blocks
from engine.block_pool import BlockPool
from engine.config import EngineConfig, default_worker_id
from engine.grammars import Grammars
from engine.kv_cache import KvCache
from engine.loading import (
    LoadedModel,
    PoolSettings,
    allocate_kv_cache,
    load,
    record_decode_steps,
    resolve_max_model_len,
)
from engine.runner import Runner
from engine.sampler import Sampler
from engine.token_masks import TokenMasks
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.messages import Hello
from kvtransfer.worker_facts import Fingerprint, KvLayout, Limits, Role


@dataclass(frozen=True)
class Engine:
    """All that computes in one worker."""

    loaded: LoadedModel
    kv_cache: KvCache
    pool: BlockPool
    runner: Runner
    mover: HostBlocks
    max_model_len: int
    grammars: Grammars
    masks: TokenMasks

    @property
    def device(self) -> torch.device:
        return self.kv_cache.device

    @property
    def layout(self) -> KvLayout:
        return self.kv_cache.layout

    @property
    def fingerprint(self) -> Fingerprint:
        return self.loaded.fingerprint

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.loaded.eos_token_ids


def assemble(
    config: EngineConfig,
    model_path: Path,
    max_num_batched_tokens: int,
    *,
    record_decode: bool = False,
    swap_gib: float = 0.0,
) -> Engine:
    """Loads the model and takes the memory for its KV pool. `record_decode`: decode steps run as CUDA graphs, where
    device and kernels can. `swap_gib`: GiB of the host's memory for swapped KV. Raises EngineError subclasses."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    loaded = load(
        model_path,
        dtype=config.dtype,
        device=config.device,
        kernels=config.kernels,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    max_model_len = resolve_max_model_len(loaded.config, config.max_model_len)
    grammars = Grammars(model_path, loaded.config.vocab_size, loaded.eos_token_ids)
    masks = TokenMasks(loaded.config.vocab_size, grammars, loaded.device, _mask_threads(loaded.device))
    sampler = Sampler(loaded.config.vocab_size, loaded.eos_token_ids, loaded.device, loaded.kernels.sampling, masks)
    record_decode = record_decode and loaded.device.type == "cuda" and loaded.kernels.capturable
    settings = _pool_settings(config, max_model_len, max_num_batched_tokens, record_decode=record_decode)
    kv_cache = allocate_kv_cache(loaded, settings, sampler)
    mover = allocate_host_blocks(kv_cache, swap_gib)
    pool = BlockPool(kv_cache.num_blocks, config.block_size)
    graphs = record_decode_steps(loaded, settings, kv_cache) if settings.record_decode else None
    runner = Runner(loaded.model, loaded.kernels, kv_cache, sampler, graphs, prepare=masks.begin)
    return Engine(loaded, kv_cache, pool, runner, mover, max_model_len, grammars, masks)


def _pool_settings(
    config: EngineConfig, max_model_len: int, max_num_batched_tokens: int, *, record_decode: bool
) -> PoolSettings:
    return PoolSettings(
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        kv_cache_gib=config.kv_cache_gib,
        gpu_memory_utilization=config.gpu_memory_utilization,
        record_decode=record_decode,
    )


def _mask_threads(device: torch.device) -> int:
    """On a CPU the cores are the model's."""
    return 1 if device.type == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))


def introduce(
    config: EngineConfig, role: Role, engine: Engine, kv_endpoint: str | None, *, can_switch: bool = False
) -> Hello:
    """What this process says of itself; `generation` is drawn anew at each call. `can_switch`: it may be told to take
    the other role."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        role=role,
        worker_id=worker_id_of(config, role),
        generation=secrets.token_hex(8),
        fingerprint=engine.fingerprint,
        layout=engine.layout,
        limits=Limits(engine.max_model_len, config.max_num_seqs, engine.kv_cache.num_tokens),
        kv_endpoint=kv_endpoint,
        shares_prefixes=config.enable_prefix_caching,
        can_switch=can_switch,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
    )


def key_name_of(config: EngineConfig, role: Role) -> str:
    """Name of the key that this process connects with, if there are keys."""
    return config.curve_name or role.value


def worker_id_of(config: EngineConfig, role: Role) -> str:
    """The name of this process in the cluster, the same at each call."""
    return config.worker_id or default_worker_id(key_name_of(config, role), socket.gethostname(), os.getpid())
