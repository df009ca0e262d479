"""What a worker does at its start: identity, EOS ids, and the size of the pool."""

import json
import logging

import pytest
import torch

from engine.errors import CapacityError, DeviceError, ModelError
from engine.kv_cache import GIB, bytes_per_block
from engine.loading import (
    CUDA_OVERHEAD,
    PoolSettings,
    allocate_kv_cache,
    blocks_in,
    gpu_kv_budget,
    load,
    measure_gpu_budget,
    profile_step,
    read_eos_token_ids,
    resolve_max_model_len,
    select_device,
)
from kernels.select import UnknownBackendError
from kvtransfer.errors import SettingsError
from kvtransfer.worker_facts import KvLayout
from tests.engine.greedy_loop import argmax
from tests.tiny_models import END_OF_TURN_ID, EOS_ID, VOCAB_SIZE

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=16)


def pool_settings(**fields) -> PoolSettings:
    base = {"block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return PoolSettings(**{**base, "kv_cache_gib": 0.01, "gpu_memory_utilization": 0.9, **fields})


def test_identity_of_a_loaded_model(tiny_loaded):
    loaded = tiny_loaded("qwen3")
    assert loaded.fingerprint.architecture == "Qwen3ForCausalLM"
    assert loaded.fingerprint.dtype == "float32"
    assert loaded.fingerprint.vocab_size == VOCAB_SIZE
    assert loaded.fingerprint.config == loaded.config.digest()
    assert loaded.kv_layout(7) == KvLayout(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float32", block_size=7)
    assert loaded.eos_token_ids == {EOS_ID, END_OF_TURN_ID}


def test_the_same_folder_has_the_same_fingerprint_and_the_dtype_is_part_of_it(tiny_checkpoint, tiny_loaded):
    fingerprint = tiny_loaded("llama2").fingerprint
    again = load(tiny_checkpoint("llama2"), dtype="float32", device="cpu", kernels="reference")
    other = load(tiny_checkpoint("llama2"), dtype="bfloat16", device="cpu", kernels="reference")
    assert again.fingerprint == fingerprint
    assert other.fingerprint.weights == fingerprint.weights
    assert other.fingerprint != fingerprint
    assert other.model.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 5]}, {"eos_token_id": 7}, {2, 5, 7}),
        ({"eos_token_id": None}, {"eos_token_id": [1, 2]}, {1, 2}),
        ({}, {}, set()),
    ],
)
def test_eos_ids_come_from_both_files(config, generation, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, 1.5])
def test_eos_ids_that_are_none_are_refused(value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"eos_token_id in config\.json"):
        read_eos_token_ids(tmp_path)


def test_max_model_len(tiny_loaded):
    config = tiny_loaded("llama2").config
    assert resolve_max_model_len(config, None) == 1024
    assert resolve_max_model_len(config, 100) == 100
    with pytest.raises(SettingsError, match=r"--max-model-len 1025 .* max_position_embeddings, 1024"):
        resolve_max_model_len(config, 1025)


def test_unknown_dtype_device_and_kernels_are_named(tiny_checkpoint):
    folder = tiny_checkpoint("llama2")
    with pytest.raises(ModelError, match="'int8'; choose one of: float32, bfloat16, float16"):
        load(folder, dtype="int8", device="cpu", kernels="auto")
    with pytest.raises(UnknownBackendError, match="'fast'"):
        load(folder, dtype="auto", device="cpu", kernels="fast")
    with pytest.raises(DeviceError, match="'abacus'"):
        select_device("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there():
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match="no usable GPU"):
        select_device("cuda")


def test_the_pool_takes_the_whole_budget_and_says_so(tiny_loaded, caplog):
    loaded = tiny_loaded("llama2")
    with caplog.at_level(logging.INFO, logger="engine.loading"):
        cache = allocate_kv_cache(loaded, pool_settings(), argmax)
    num_blocks = int(0.01 * GIB) // bytes_per_block(loaded.kv_layout(16))
    assert cache.num_blocks == num_blocks == 436
    assert (
        caplog.messages[-1]
        == "KV pool: 436 blocks of 16 tokens = 6976 tokens (0.0 GiB), max concurrency at 256 tokens: 27"
    )


def test_a_budget_too_small_for_one_request_says_how_much_is_needed():
    size = bytes_per_block(LAYOUT)
    assert blocks_in(4 * size, LAYOUT, max_model_len=64) == 4
    big = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    with pytest.raises(CapacityError, match=r"max_model_len 131072 needs 16\.000 GiB.* 2\.000 GiB, good for 16384 tok"):
        blocks_in(2 * GIB, big, max_model_len=131072)
    with pytest.raises(CapacityError, match="good for 0 tokens"):
        blocks_in(-5, LAYOUT, max_model_len=1)


# --- a GPU's memory ----------------------------------------------------------------------------------


class FakeGpu:
    """A GPU's memory and the processes on it, in place of what torch.cuda says."""

    TOTAL = 80 * GIB

    def __init__(self, monkeypatch) -> None:
        self.held: dict[str, int] = {}
        for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, self.TOTAL))

    @property
    def free(self) -> int:
        return self.TOTAL - sum(self.held.values())


class Sharer:
    """One worker that loads weights, measures its budget and takes it."""

    CONTEXT, WEIGHTS, ACTIVATIONS = CUDA_OVERHEAD, 10 * GIB, 2 * GIB

    def __init__(self, gpu: FakeGpu, name: str, utilization: float) -> None:
        self.gpu = gpu
        self.name = name
        self.utilization = utilization

    def load(self) -> None:
        self.gpu.held[self.name] = self.CONTEXT + self.WEIGHTS

    def allocate_kv(self, monkeypatch) -> int:
        """Bytes of its KV pool, which it takes with its activations."""
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.WEIGHTS)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.WEIGHTS + self.ACTIVATIONS)
        budget = measure_gpu_budget(torch.device("cuda"), self.utilization, lambda: None)
        self.gpu.held[self.name] += budget + self.ACTIVATIONS
        return budget


ONE_AFTER_THE_OTHER = ("load 0", "kv 0", "load 1", "kv 1")
THE_OTHER_FIRST = ("load 1", "kv 1", "load 0", "kv 0")
AT_ONCE = ("load 0", "load 1", "kv 0", "kv 1")
CROSSED = ("load 0", "load 1", "kv 1", "kv 0")


@pytest.mark.parametrize("order", [ONE_AFTER_THE_OTHER, THE_OTHER_FIRST, AT_ONCE, CROSSED])
def test_two_workers_that_share_a_gpu_get_the_same_whatever_their_order(order, monkeypatch):
    gpu = FakeGpu(monkeypatch)
    sharers = [Sharer(gpu, f"worker-{index}", 0.45) for index in range(2)]
    pools = {}
    for what, index in (event.split() for event in order):
        if what == "load":
            sharers[int(index)].load()
        else:
            pools[index] = sharers[int(index)].allocate_kv(monkeypatch)
    assert pools == {"0": int(23.5 * GIB), "1": int(23.5 * GIB)}  # 36 - 0.5 - 10 - 2
    assert gpu.free == FakeGpu.TOTAL - 2 * 36 * GIB


def test_a_share_that_is_not_free_is_refused_with_the_numbers(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    gpu.held["somebody else"] = 40 * GIB
    worker = Sharer(gpu, "worker", 0.9)
    worker.load()
    with pytest.raises(CapacityError, match=r"0\.9 of 80\.0 GiB leaves 61\.5 GiB to take, but only 29\.5 GiB are free"):
        worker.allocate_kv(monkeypatch)
    gpu.held["somebody else"] = 8 * GIB
    assert worker.allocate_kv(monkeypatch) == int(59.5 * GIB)


def test_weights_beyond_the_share_leave_less_than_nothing():
    assert gpu_kv_budget(10 * GIB, 0.5, peak=5 * GIB) == -CUDA_OVERHEAD


@pytest.mark.parametrize(
    ("budget_tokens", "num_seqs", "expected_rows", "expected_tokens"),
    [(64, 8, 8, 64), (4, 8, 4, 4), (600, 3, 3, 258), (1, 1, 1, 1)],
)
def test_the_profiling_step_is_a_full_one(
    budget_tokens, num_seqs, expected_rows, expected_tokens, tiny_loaded, monkeypatch
):
    batches, sampled = [], []

    def sample(logits, requests):
        sampled.append((len(logits), max(request.num_tokens for request in requests)))
        return argmax(logits, requests)

    loaded = tiny_loaded("mistral")
    forward = loaded.model.forward
    monkeypatch.setattr(loaded.model, "forward", lambda batch, *rest: batches.append(batch) or forward(batch, *rest))
    profile_step(loaded, pool_settings(max_num_batched_tokens=budget_tokens, max_num_seqs=num_seqs), sample)
    assert sampled == [(expected_rows, 256)]
    assert [len(batch.token_ids) for batch in batches] == [expected_tokens]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_pool_of_a_gpu_stays_within_its_share(tiny_checkpoint):
    loaded = load(tiny_checkpoint("llama2"), dtype="float32", device="cuda", kernels="auto")
    _, total = torch.cuda.mem_get_info()
    share = 2 * GIB / total
    cache = allocate_kv_cache(loaded, pool_settings(gpu_memory_utilization=share), argmax)
    assert GIB < cache.num_bytes <= 2 * GIB
