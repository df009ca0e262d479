"""Which configs are served, and what the others are told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelError
from engine.model_config import ModelConfig, load_model_config
from tests.tiny_models import TINY_MODELS

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture
def read_changed(tiny_checkpoint, tmp_path):
    """Reads a tiny model's config after some of its fields were replaced."""

    def read(name: str, **fields: Any) -> ModelConfig:
        source = json.loads((tiny_checkpoint(name) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**source, **fields}))
        return load_model_config(tmp_path)

    return read


@pytest.mark.parametrize("name", TINY_MODELS)
def test_inverse_frequencies_equal_transformers(name, tiny_checkpoint):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_checkpoint(name)))
    ours = load_model_config(tiny_checkpoint(name)).inverse_frequencies()
    torch.testing.assert_close(ours, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_llama3_scaling_reaches_all_three_bands(read_changed):
    plain = read_changed("llama2").inverse_frequencies()
    ratios = (read_changed("llama2", rope_parameters=LLAMA3_ROPE).inverse_frequencies() / plain).tolist()
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(1 / 8)
    assert any(1 / 8 < ratio < 1 for ratio in ratios[1:-1])


def test_the_old_place_of_rope_settings_still_counts(read_changed):
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = read_changed("llama2", rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert old == read_changed("llama2", rope_parameters=LLAMA3_ROPE)


def test_what_the_tiny_models_stand_for(tiny_checkpoint):
    configs = {name: load_model_config(tiny_checkpoint(name)) for name in TINY_MODELS}
    assert configs["mistral"].windows == (24, 24, 24)
    assert configs["qwen2-windowed"].windows == (None, 20, 20)
    assert configs["qwen2"].windows == (None, None, None)
    assert (configs["qwen2"].qkv_bias, configs["qwen2"].o_bias, configs["qwen2"].tied_embeddings) == (True, False, True)
    assert (configs["qwen3"].qk_norm, configs["qwen3"].head_dim, configs["qwen3"].q_size) == (True, 32, 128)
    assert configs["llama-linear-biased"].mlp_bias
    assert configs["llama-linear-biased"].o_bias
    assert configs["llama3"].rope_scaling.original_length == 128


def test_mistral_without_a_window_sees_everything(read_changed):
    assert read_changed("mistral", sliding_window=None).windows == (None, None, None)


def test_qwen_layer_types_are_honoured(read_changed):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_changed("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=8).windows == (8, None, 8)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "llama2",
            {"architectures": ["GemmaForCausalLM"]},
            r"\['GemmaForCausalLM'\]; supported: LlamaForCausalLM, Mis",
        ),
        ("llama2", {"architectures": None}, r"unsupported architecture \[\]"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("mistral", {"attention_bias": True}, "MistralForCausalLM: attention_bias=True"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='yarn'"),
        ("llama2", {"rope_parameters": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama2", {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "config.json is not a valid config",
        ),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types='sliding_attention'"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "layer"),
        ("llama2", {"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types="),
        ("mistral", {"sliding_window": 0}, "sliding_window is less than one"),
        ("llama2", {"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ("llama2", {"head_dim": 15}, "head_dim.*15"),
        ("llama2", {"vocab_size": "many"}, "config.json is not a valid config"),
    ],
)
def test_what_is_not_supported_is_named(name, fields, message, read_changed):
    with pytest.raises(ModelError, match=message):
        read_changed(name, **fields)


def test_a_folder_without_config_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load_model_config(tmp_path)


def test_a_config_that_is_no_object_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="does not hold a JSON object"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "fields", [{"rms_norm_eps": 1e-4}, {"rope_parameters": LLAMA3_ROPE}, {"attention_bias": True}, {"head_dim": 32}]
)
def test_what_changes_the_forward_changes_the_digest(fields, read_changed):
    assert read_changed("llama2", **fields).digest() != read_changed("llama2").digest()


def test_the_length_limit_does_not_change_the_digest(read_changed):
    assert read_changed("llama2", max_position_embeddings=77).digest() == read_changed("llama2").digest()
