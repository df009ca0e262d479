"""A whole model over a float8 KV cache.

It must compute exactly what a model does that keeps K and V in float32 after rounding them to the codes: that is
another path through every layer, with another rounding (a search among all codes). How far that is from no rounding at
all is a property of the format; the bounds below state it.
"""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import build_batch
from engine.kv_cache import KvCache, bytes_per_block
from engine.loading import load
from engine.request import ScheduledRow
from engine.runner import Runner
from kernels.reference import ReferenceKernels
from tests.engine.greedy_loop import GreedyLoop, argmax, make_request, make_runner
from tests.kernels.float8_case import numbers_of, to_codes
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
CHUNK, BLOCK_SIZE = 16, 8
TINY_MEAN_ERROR, TINY_WORST_ERROR = 0.2, 0.6
"""Bounds of the logits' relative error, over tokens: random weights as wide as those of the tiny models are the worst
case (measured: 0.06 to 0.14 on the mean, 0.17 to 0.43 at worst; bfloat16: 0.03 at worst)."""
REAL_MEAN_ERROR, REAL_SAME_CHOICE = 0.1, 0.9
"""Of SmolLM2 on ordinary text: measured 0.064, and 98 % of the tokens chosen are the same."""


class RoundingKernels(ReferenceKernels):
    """Keeps in a float32 pool the numbers that codes would stand for."""

    def rope_store(self, query, key, value, cos, sin, k_pool, v_pool, slot_mapping, scales=None):
        rotated = super().rope_store(query, key, value, cos, sin, k_pool, v_pool, slot_mapping)
        for pool, scale in ((k_pool, scales.key), (v_pool, scales.value)):
            tokens = pool.view(-1, *pool.shape[2:])
            tokens[slot_mapping] = numbers_of(to_codes(tokens[slot_mapping], scale), scale).float()
        return rotated

    def paged_decode(self, query, k_pool, v_pool, rows, scale, window, softcap=None, scales=None):
        return super().paged_decode(query, k_pool, v_pool, rows, scale, window, softcap)

    def paged_prefill(self, query, k_pool, v_pool, rows, scale, window, softcap=None, scales=None):
        return super().paged_prefill(query, k_pool, v_pool, rows, scale, window, softcap)


class RoundedCache(KvCache):
    """A float32 pool that says what it would be multiplied by."""

    def __init__(self, layout, num_blocks, scales):
        super().__init__(layout, num_blocks, RoundingKernels(), CPU)
        self.given = scales

    def scales(self, index):
        return self.given[index]


@pytest.fixture(scope="module")
def scaled_checkpoint(tiny_checkpoint, tmp_path_factory):
    """A tiny model whose checkpoint has scales far from 1, different for K, V, layers and heads."""

    def make(name):
        folder = tmp_path_factory.mktemp("scaled") / name
        shutil.copytree(tiny_checkpoint(name), folder)
        tensors = load_file(folder / "model.safetensors")
        for layer in range(3):
            heads = torch.arange(3 if name == "smollm2" else 2 if name == "qwen2" else 1)
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = 0.02 * 1.7 ** (layer + heads)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = 0.3 * 0.6 ** (layer + heads)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def load_with(folder, kv_cache_dtype, dtype="float32"):
    return load(folder, dtype=dtype, device="cpu", kernels="reference", kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("name", ["smollm2", "mistral", "qwen2"])
def test_tokens_are_those_of_rounded_keys_and_values(name, scaled_checkpoint):
    folder = scaled_checkpoint(name)
    rng = random.Random(name)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (33, 1, 20)]
    stored, plain = load_with(folder, "fp8"), load_with(folder, "auto")
    assert stored.fingerprint == plain.fingerprint
    tokens = GreedyLoop(make_runner(stored, num_blocks=30, block_size=BLOCK_SIZE), CHUNK, 12).run(prompts)
    cache = RoundedCache(plain.kv_layout(BLOCK_SIZE), 30, stored.kv_scales)
    cache.fill(float("nan"))
    rounded = Runner(plain.model, RoundingKernels(), cache, argmax)
    assert GreedyLoop(rounded, CHUNK, 12).run(prompts) == tokens
    assert len({tuple(row) for row in tokens}) == len(prompts), "outputs must depend on the prompt"


def logits_of(model, cache, kernels, token_ids):
    """Of every token, computed in chunks; [T, vocab_size]."""
    request = make_request("r", token_ids, range(len(token_ids) // BLOCK_SIZE + 1))
    found = []
    with torch.inference_mode():
        for start in range(0, len(token_ids), CHUNK):
            count = min(CHUNK, len(token_ids) - start)
            batch = build_batch([ScheduledRow(request, start, count)], BLOCK_SIZE, CPU)
            object.__setattr__(batch, "sample_tokens", torch.arange(count))
            found.append(model(batch, cache, kernels, None))
    return torch.cat(found)


def relative_errors(folder, token_ids):
    """[T]: length of the difference that float8 makes over the length of the logits."""
    logits = []
    for kv_cache_dtype in ("fp8", "auto"):
        loaded = load_with(folder, kv_cache_dtype)
        cache = loaded.make_kv_cache(len(token_ids) // BLOCK_SIZE + 1, BLOCK_SIZE)
        logits.append(logits_of(loaded.model, cache, loaded.kernels, token_ids))
    return (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1), (logits[0].argmax(-1) == logits[1].argmax(-1))


@pytest.mark.parametrize("name", ["llama2", "smollm2", "qwen2", "qwen3"])
def test_the_error_of_random_models_is_within_its_bound(name, tiny_checkpoint):
    rng = random.Random(name)
    errors, _ = relative_errors(tiny_checkpoint(name), [rng.randrange(5, VOCAB_SIZE) for _ in range(100)])
    assert 1e-3 < errors.mean() < TINY_MEAN_ERROR, "and there is an error: the codes are in use"
    assert errors.max() < TINY_WORST_ERROR


TEXT = (
    "The capital of France is Paris. The river Seine flows through it, and the Eiffel tower was built there in 1889 "
    "for a world's fair. Many people visit every year, and most of them come in the summer when the weather is warm."
)


def test_the_error_of_the_default_model_is_within_its_bound(smollm2):
    from tokenizers import Tokenizer

    token_ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT).ids
    errors, same_choice = relative_errors(smollm2, token_ids)
    assert errors.mean() < REAL_MEAN_ERROR
    assert same_choice.float().mean() > REAL_SAME_CHOICE


def test_other_formats_of_the_pool_compute_the_same_but_for_rounding(tiny_checkpoint):
    rng = random.Random(1)
    token_ids = [rng.randrange(5, VOCAB_SIZE) for _ in range(40)]
    folder, found = tiny_checkpoint("qwen3"), {}
    for kv_cache_dtype in ("float32", "bfloat16", "float16"):
        loaded = load_with(folder, kv_cache_dtype)
        cache = loaded.make_kv_cache(6, BLOCK_SIZE)
        assert cache.layer(0)[0].dtype == getattr(torch, kv_cache_dtype)
        found[kv_cache_dtype] = logits_of(loaded.model, cache, loaded.kernels, token_ids)
    exact = found.pop("float32")
    errors = {name: ((logits - exact).norm() / exact.norm()).item() for name, logits in found.items()}
    assert 0.0 < errors["float16"] < errors["bfloat16"] < 0.03


def test_a_token_takes_half_the_bytes_of_half_precision(tiny_checkpoint):
    folder = tiny_checkpoint("llama2")
    layouts = [load_with(folder, name, dtype="bfloat16").kv_layout(16) for name in ("fp8", "auto")]
    assert [layout.dtype for layout in layouts] == ["float8_e4m3fn", "bfloat16"]
    assert 2 * bytes_per_block(layouts[0]) == bytes_per_block(layouts[1])
