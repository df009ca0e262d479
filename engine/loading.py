"""From a checkpoint folder to a model that runs and a KV pool that fits: what a worker does once, at its start."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engine.block_pool import blocks_for
from engine.cuda_graphs import DecodeGraphs, Forward, GraphLimits, GraphRecorder, Replay
from engine.dtypes import AUTO, name_of, select_dtype, select_kv_dtype
from engine.errors import CapacityError, DeviceError, ModelError
from engine.kv_cache import FLOAT8, GIB, KvCache, bytes_per_block
from engine.model import CausalLm
from engine.model_config import ModelConfig, load_model_config, read_json
from engine.request import Request, ScheduledRow
from engine.runner import Runner, Sample
from engine.weights import load_weights
from kernels.face import Kernels, KvScales
from kernels.select import select_kernels
from kvtransfer.errors import SettingsError
from kvtransfer.request_parts import RequestSpec, SamplingParams
from kvtransfer.worker_facts import Fingerprint, KvLayout

logger = logging.getLogger(__name__)

CUDA_OVERHEAD: Final = 512 << 20
"""What CUDA takes of a GPU for one process beside torch's allocator (context, kernels), about, in bytes."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in the device's memory, and who it is. `kv_dtype`: what its K and V are stored in."""

    model: CausalLm
    config: ModelConfig
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_scales: tuple[KvScales, ...]  # of each layer; in use if `kv_dtype` is float8
    fingerprint: Fingerprint
    eos_token_ids: frozenset[int]

    def kv_layout(self, block_size: int) -> KvLayout:
        """The KV of one token, and the worker's own block size."""
        return KvLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=name_of(self.kv_dtype),
            block_size=block_size,
        )

    def make_kv_cache(self, num_blocks: int, block_size: int, *, with_scratch: bool = False) -> KvCache:
        """A pool for this model. Raises CapacityError."""
        layout = self.kv_layout(block_size)
        scales = self.kv_scales if layout.dtype == FLOAT8 else None
        return KvCache(layout, num_blocks, self.kernels, self.device, scales=scales, with_scratch=with_scratch)


@dataclass(frozen=True)
class PoolSettings:
    """What decides the size of the KV pool. `kv_cache_gib` counts on a CPU, `gpu_memory_utilization` (share of the
    device's memory that is this worker's own, whatever others use of the rest) on a GPU."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_gib: float
    gpu_memory_utilization: float
    record_decode: bool = False  # with CUDA graphs; needs a capturable backend on a GPU

    @property
    def graph_limits(self) -> GraphLimits:
        return GraphLimits(self.max_num_seqs, self.max_model_len)


def load(model_path: Path, *, dtype: str, device: str, kernels: str, kv_cache_dtype: str = AUTO) -> LoadedModel:
    """Loads a checkpoint folder. Raises ModelError (the checkpoint), DeviceError, KernelsError (no such
    kernels), CapacityError (no memory for the weights)."""
    target = select_device(device)
    compute_dtype = select_dtype(dtype, model_path)
    kv_dtype = select_kv_dtype(kv_cache_dtype, compute_dtype)
    backend = select_kernels(kernels, target, converts_kv=kv_dtype != compute_dtype)
    config = load_model_config(model_path)
    model = _allocate(config, compute_dtype, target)
    weights = load_weights(model, model_path)
    model.prepare(backend)
    fingerprint = Fingerprint(
        architecture=config.architecture,
        config=config.digest(),
        weights=weights.digest,
        dtype=name_of(compute_dtype),
        vocab_size=config.vocab_size,
    )
    eos_token_ids = read_eos_token_ids(model_path)
    formats = f"{fingerprint.dtype}, KV {name_of(kv_dtype)}"
    logger.info("loaded %s (%s, %s, kernels %s)", model_path, config.architecture, formats, backend.name)
    return LoadedModel(
        model=model,
        config=config,
        kernels=backend,
        device=target,
        dtype=compute_dtype,
        kv_dtype=kv_dtype,
        kv_scales=weights.kv_scales,
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids,
    )


def select_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one. Raises DeviceError if torch cannot use it here."""
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {name!r}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--device {name}: torch finds no usable GPU")
    return device


def read_eos_token_ids(model_path: Path) -> frozenset[int]:
    """Ids that end a sequence: the union of config.json and generation_config.json, each an int, a list, or absent."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (model_path / name).exists():
            ids.update(_as_ids(name, read_json(model_path / name).get("eos_token_id")))
    return frozenset(ids)


def resolve_max_model_len(config: ModelConfig, wanted: int | None) -> int:
    """Tokens a request may have; by default all that the model was made for. Raises SettingsError for more."""
    if wanted is not None and wanted > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise SettingsError(f"--max-model-len {wanted} is more than the model's max_position_embeddings, {limit}")
    return wanted or config.max_position_embeddings


def allocate_kv_cache(loaded: LoadedModel, settings: PoolSettings, sample: Sample) -> KvCache:
    """The worker's KV pool, as large as the settings and the device allow. `sample` takes part in the profiling run.

    Raises CapacityError if not even one request of `max_model_len` tokens would fit, saying how much is needed.
    """
    layout = loaded.kv_layout(settings.block_size)
    budget = _cpu_budget(settings) if loaded.device.type == "cpu" else _gpu_budget(loaded, settings, sample)
    scratch = settings.record_decode * bytes_per_block(layout)
    num_blocks = blocks_in(budget - scratch, layout, settings.max_model_len)
    kv_cache = loaded.make_kv_cache(num_blocks, settings.block_size, with_scratch=settings.record_decode)
    logger.info(
        "KV pool: %d blocks of %d tokens = %d tokens (%.1f GiB), max concurrency at %d tokens: %d",
        num_blocks,
        settings.block_size,
        kv_cache.num_tokens,
        kv_cache.num_bytes / GIB,
        settings.max_model_len,
        num_blocks // blocks_for(settings.max_model_len, settings.block_size),
    )
    return kv_cache


def blocks_in(budget_bytes: int, layout: KvLayout, max_model_len: int) -> int:
    """Blocks that `budget_bytes` pay for. Raises CapacityError if a request of `max_model_len` does not fit them."""
    num_blocks = max(0, budget_bytes) // bytes_per_block(layout)
    needed = blocks_for(max_model_len, layout.block_size)
    if num_blocks < needed:
        needed_gib = needed * bytes_per_block(layout) / GIB
        raise CapacityError(
            f"one request of max_model_len {max_model_len} needs {needed_gib:.3f} GiB of KV, "
            f"the budget is {budget_bytes / GIB:.3f} GiB, good for {num_blocks * layout.block_size} tokens: "
            "lower --max-model-len or raise --kv-cache-gib (CPU) or --gpu-memory-utilization (GPU)"
        )
    return num_blocks


def _cpu_budget(settings: PoolSettings) -> int:
    return int(settings.kv_cache_gib * GIB)


def _gpu_budget(loaded: LoadedModel, settings: PoolSettings, sample: Sample) -> int:
    """Measures a step at full load, then asks what is left for KV. Graphs have memory of their own."""
    graphs = (lambda: profile_graphs(loaded, settings)) if settings.record_decode else None
    return measure_gpu_budget(
        loaded.device, settings.gpu_memory_utilization, lambda: profile_step(loaded, settings, sample), graphs
    )


def measure_gpu_budget(
    device: torch.device,
    utilization: float,
    full_step: Callable[[], None],
    graphs: Callable[[], None] | None = None,
) -> int:
    """Bytes for KV on a GPU, of which `utilization` is this process's: measures a step at full load and the recording
    of `graphs`, then asks what they leave. Raises CapacityError if others hold too much for it to get its share."""
    peak = _peak_memory(device, full_step)
    if graphs is not None:
        weights = torch.cuda.memory_allocated(device)
        peak += _peak_memory(device, graphs) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = gpu_kv_budget(total, utilization, peak=peak)
    check_is_free(peak + budget - torch.cuda.memory_reserved(device), free, total, utilization)
    return budget


def _peak_memory(device: torch.device, work: Callable[[], None]) -> int:
    """Most bytes in tensors while `work` runs, those that were there before among them."""
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def gpu_kv_budget(total: int, utilization: float, *, peak: int) -> int:
    """Bytes for KV on a GPU of `total` bytes, negative if there are none.

        |<--------------- total * utilization ------------------>|
        | CUDA_OVERHEAD | peak: weights and activations |   KV   |  not ours

    Only what this process takes counts: torch's own peak, which is exact, and a fixed part for what CUDA takes beside
    torch. What the device says is used holds the memory of others too, and workers that share a GPU may start in any
    order or at once; charging one with it would leave it without room.
    """
    return int(total * utilization) - CUDA_OVERHEAD - peak


def check_is_free(needed: int, free: int, total: int, utilization: float) -> None:
    """Raises CapacityError unless the `needed` bytes that this process has still to take are free."""
    if needed > free:
        raise CapacityError(
            f"--gpu-memory-utilization {utilization:g} of {total / GIB:.1f} GiB leaves {needed / GIB:.1f} GiB to take, "
            f"but only {free / GIB:.1f} GiB are free: other processes use this GPU. Stop them, or give each worker "
            "a share such that all of them together stay below 1"
        )


def profile_step(loaded: LoadedModel, settings: PoolSettings, sample: Sample) -> None:
    """One step at full load over a pool of a single block: a chunk at the end of the longest request, beside as many
    rows of one token as fit, as long. All block tables name that block, so the memory used is real, the numbers are
    not. With a move of KV, it also has every kernel compiled before the first request."""
    kv_cache = loaded.make_kv_cache(1, settings.block_size)
    kv_cache.fill(0.0)
    num_short = min(settings.max_num_seqs, settings.max_num_batched_tokens) - 1
    chunk = min(settings.max_num_batched_tokens - num_short, settings.max_model_len)
    rows = [
        _profile_row(settings, settings.max_model_len, chunk),
        *[_profile_row(settings, settings.max_model_len, 1)] * num_short,
    ]
    Runner(loaded.model, loaded.kernels, kv_cache, sample).step(rows)
    kv_cache.splice(0, [0], 0, 1, *kv_cache.gather(0, [0], 0, 1))


def profile_graphs(loaded: LoadedModel, settings: PoolSettings) -> None:
    """Runs each decode step that is going to be recorded, at its largest lengths, over a pool of a single block."""
    kv_cache = loaded.make_kv_cache(1, settings.block_size, with_scratch=True)
    kv_cache.fill(0.0)

    def run_once(step: Callable[[], torch.Tensor]) -> Replay:
        step()
        return step

    DecodeGraphs(_decode_step(loaded, kv_cache), kv_cache, settings.graph_limits, run_once)


def record_decode_steps(loaded: LoadedModel, settings: PoolSettings, kv_cache: KvCache) -> DecodeGraphs:
    """Records the decode steps over the worker's own pool."""
    return DecodeGraphs(_decode_step(loaded, kv_cache), kv_cache, settings.graph_limits, GraphRecorder(loaded.device))


def _decode_step(loaded: LoadedModel, kv_cache: KvCache) -> Forward:
    return lambda batch: loaded.model(batch, kv_cache, loaded.kernels, None)


def _profile_row(settings: PoolSettings, num_tokens: int, count: int) -> ScheduledRow:
    """The last `count` tokens of a made-up request of `num_tokens`."""
    sampling = SamplingParams(max_tokens=1, seed=0)
    spec = RequestSpec("profile", 0, prompt_token_ids=(0,) * num_tokens, sampling=sampling)
    request = Request(spec, gateway="", block_ids=[0] * blocks_for(num_tokens, settings.block_size))
    return ScheduledRow(request, start=num_tokens - count, count=count)


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLm:
    try:
        return CausalLm.allocate(config, dtype, device)
    except RuntimeError as error:
        raise CapacityError(f"{device} has no room for the weights: {error}") from error


def _as_ids(file: str, value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ModelError(f"eos_token_id in {file} is {value!r}, neither a token id nor a list of them")
    return ids
