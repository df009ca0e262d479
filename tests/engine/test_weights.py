"""What a broken checkpoint says, and what two checkpoints have to share to count as the same model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model import CausalLm
from engine.model_config import load_model_config
from engine.weights import checkpoint_dtype, load_weights
from tests.tiny_models import TINY_MODELS, save_tiny_model

CPU = torch.device("cpu")
NORM = "model.norm.weight"
Edit = Callable[[dict[str, torch.Tensor]], None]


def load_digest(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    return load_weights(CausalLm.allocate(load_model_config(folder), dtype, CPU), folder).digest


@pytest.fixture
def edited(tiny_checkpoint, tmp_path) -> Callable[[str, Edit], Path]:
    """A copy of a single-file tiny model with its tensors changed by a function."""

    def edit(name: str, change: Edit) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(tiny_checkpoint(name), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_parameter_is_filled(name, tiny_checkpoint):
    folder = tiny_checkpoint(name)
    model = CausalLm.allocate(load_model_config(folder), torch.float32, CPU)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load_weights(model, folder)
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_the_sharded_tiny_model_has_shards(tiny_checkpoint):
    assert len(list(tiny_checkpoint("llama3").glob("*.safetensors"))) > 1


def test_sharding_does_not_change_the_digest(tiny_checkpoint, tmp_path):
    sharded = tiny_checkpoint("llama3")
    shutil.copy(sharded / "config.json", tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        tensors.update(load_file(file))
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_digest(tmp_path) == load_digest(sharded)


def test_the_digest_does_not_depend_on_the_compute_dtype(tiny_checkpoint):
    folder = tiny_checkpoint("llama2")
    assert load_digest(folder, torch.bfloat16) == load_digest(folder, torch.float32)


def test_digests_of_models_differ(tiny_checkpoint):
    assert len({load_digest(tiny_checkpoint(name)) for name in TINY_MODELS}) == len(TINY_MODELS)


@pytest.mark.parametrize("name", [NORM, "model.layers.1.self_attn.v_proj.weight", "model.layers.2.mlp.up_proj.weight"])
def test_one_changed_number_changes_the_digest(name, tiny_checkpoint, edited):
    def change(tensors):
        tensors[name].view(-1)[tensors[name].numel() // 2] += 1.0

    assert load_digest(edited("llama2", change)) != load_digest(tiny_checkpoint("llama2"))


def test_two_tensors_that_swap_names_change_the_digest(tiny_checkpoint, edited):
    first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"

    def change(tensors):
        tensors[first], tensors[second] = tensors[second], tensors[first]

    assert load_digest(edited("llama2", change)) != load_digest(tiny_checkpoint("llama2"))


def test_a_missing_weight_is_named(edited):
    folder = edited("llama2", lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights.*model\.layers\.1\.mlp\.down_proj\.weight"):
        load_digest(folder)


def test_a_surplus_weight_is_named(edited):
    folder = edited("llama2", lambda tensors: tensors.update({"model.layers.3.mlp.x": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"surplus weight model\.layers\.3\.mlp\.x"):
        load_digest(folder)


def test_a_bias_that_the_config_does_not_know_is_surplus(edited):
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = edited("llama2", lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(ModelError, match=f"surplus weight {name}"):
        load_digest(folder)


def test_a_wrong_shape_is_named(edited):
    folder = edited("llama2", lambda tensors: tensors.update({NORM: torch.zeros(63)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[63\], the config asks for \[64\]"):
        load_digest(folder)


def test_quantized_weights_are_refused(edited):
    folder = edited("llama2", lambda tensors: tensors.update({NORM: torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int8"):
        load_digest(folder)


def test_rotary_frequencies_and_a_second_copy_of_tied_embeddings_are_harmless(tiny_checkpoint, edited):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert load_digest(edited("qwen2", change)) == load_digest(tiny_checkpoint("qwen2"))


def test_a_head_that_contradicts_tied_embeddings_is_refused(edited):
    folder = edited("qwen2", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 64)}))
    with pytest.raises(ModelError, match=r"config\.json ties the embeddings, but lm_head\.weight differs"):
        load_digest(folder)


@pytest.mark.parametrize("kept", [0, 5, 300, 100_000])
def test_a_truncated_file_is_a_model_error_that_names_it(kept, edited):
    folder = edited("llama2", lambda tensors: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"cannot read weights from .*model\.safetensors"):
        load_digest(folder)


def test_a_missing_shard_is_named(tiny_checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint("llama3"), folder)
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_digest(folder)


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../other/model.safetensors"}}']
)
def test_a_broken_shard_index_is_named(index, tiny_checkpoint, tmp_path):
    shutil.copy(tiny_checkpoint("llama3") / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load_digest(tmp_path)


def test_a_weight_in_two_shards_is_named(tiny_checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint("llama3"), folder)
    shards = sorted(folder.glob("*.safetensors"))
    twice = load_file(shards[0])
    save_file({**load_file(shards[1]), **twice}, shards[1])
    with pytest.raises(ModelError, match=f"{min(twice)} is in more than one file"):
        load_digest(folder)


def test_a_folder_without_weights_says_what_it_looked_for(tiny_checkpoint, tmp_path):
    shutil.copy(tiny_checkpoint("llama2") / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_digest(tmp_path)


def test_checkpoint_dtype_is_that_of_most_numbers(tmp_path):
    folder = save_tiny_model("llama2", tmp_path / "model", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors[NORM] = tensors[NORM].float()
    save_file(tensors, folder / "model.safetensors")
    assert checkpoint_dtype(folder) == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
