"""Scales of a float8 KV cache in a checkpoint: all kinds of right ones, and what is said of wrong ones."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.loading import load
from tests.tiny_models import save_tiny_model

LAYERS, HEADS = 3, 2  # of the tiny llama3


@pytest.fixture
def with_scales(tmp_path):
    """A tiny checkpoint to which a function has added tensors."""

    def make(scales):
        folder = save_tiny_model("llama3", tmp_path / "model")
        save_file(scales, folder / "scales.safetensors")
        index_file = folder / "model.safetensors.index.json"
        index = json.loads(index_file.read_text())
        index["weight_map"] |= dict.fromkeys(scales, "scales.safetensors")
        index_file.write_text(json.dumps(index))
        return folder

    return make


def scales_of(*shape, change=None):
    """A checkpoint's: layer i has 0.5 + i for K and twice that for V, head after head 1 more."""
    found = {}
    for layer in range(LAYERS):
        for which, factor in (("k", 1), ("v", 2)):
            heads = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
            found[f"model.layers.{layer}.self_attn.{which}_scale"] = (0.5 + layer + heads) * factor
    return found | (change or {})


def load_float8(folder):
    return load(folder, dtype="auto", device="cpu", kernels="reference", kv_cache_dtype="fp8")


@pytest.mark.parametrize("shape", [(), (1,), (HEADS,)])
def test_scales_of_every_shape_reach_the_pool(with_scales, shape):
    loaded = load_float8(with_scales(scales_of(*shape)))
    cache = loaded.make_kv_cache(2, 4)
    for layer in range(LAYERS):
        steps = torch.arange(HEADS) if shape == (HEADS,) else torch.zeros(HEADS)
        assert torch.equal(cache.scales(layer).key, 0.5 + layer + steps)
        assert torch.equal(cache.scales(layer).value, 2 * (0.5 + layer + steps))


def test_a_checkpoint_without_scales_means_one(tiny_checkpoint):
    cache = load_float8(tiny_checkpoint("llama3")).make_kv_cache(2, 4)
    for layer in range(LAYERS):
        assert cache.scales(layer).key.tolist() == cache.scales(layer).value.tolist() == [1.0] * HEADS


def test_scales_are_not_in_use_where_numbers_are_stored_as_they_are(with_scales):
    loaded = load(with_scales(scales_of()), dtype="auto", device="cpu", kernels="reference")
    assert loaded.make_kv_cache(2, 4).scales(0) is None


def test_scales_are_part_of_the_identity(with_scales, tiny_checkpoint):
    """Two workers that read the same bytes with other scales must not exchange KV."""
    without = load_float8(tiny_checkpoint("llama3")).fingerprint
    one = load_float8(with_scales(scales_of())).fingerprint
    name = "model.layers.2.self_attn.v_scale"
    other = load_float8(with_scales(scales_of(change={name: torch.tensor(3.0)}))).fingerprint
    assert len({without.weights, one.weights, other.weights}) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.layers.1.self_attn.k_scale": torch.tensor(0.0)}, r"layers\.1\.self_attn\.k_scale is .*0\.0.*above 0"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(-1.0)}, "above 0"),
        ({"model.layers.0.self_attn.v_scale": torch.tensor(math.nan)}, "finite"),
        ({"model.layers.0.self_attn.v_scale": torch.tensor(math.inf)}, "finite"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(3)}, r"shape \[3\].*each of the 2 KV heads"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(1)}, r"torch\.int64"),
        ({"model.layers.3.self_attn.k_scale": torch.tensor(1.0)}, "the model has 3 layers"),
        (
            {"model.layers.0.self_attn.q_scale": torch.tensor(1.0)},
            r"surplus weight model\.layers\.0\.self_attn\.q_scale",
        ),
    ],
)
def test_what_is_no_scale_is_named(with_scales, change, says):
    with pytest.raises(ModelError, match=says):
        load_float8(with_scales(scales_of(change=change)))


def test_a_forgotten_scale_is_named(with_scales):
    scales = scales_of()
    del scales["model.layers.1.self_attn.v_scale"]
    with pytest.raises(ModelError, match=r"none named model\.layers\.1\.self_attn\.v_scale"):
        load_float8(with_scales(scales))
