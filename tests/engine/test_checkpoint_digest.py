"""A checkpoint's name: which changes it must notice, and that it is what loading the checkpoint says."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint_digest import CheckpointDigest, files_digest
from engine.model import CausalLm
from engine.model_config import load_model_config
from engine.weights import load_weights, weights_digest


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_file_that_decides_about_text_is_noticed(tmp_path, name):
    said = {files_digest(tmp_path)}
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content in ("", "a b", "a c"):
        (tmp_path / name).write_text(content)
        said.add(files_digest(tmp_path))
    assert len(said) == 4
    (tmp_path / name).unlink()
    assert files_digest(tmp_path) in said


def test_contents_that_swap_files_are_noticed_and_others_files_are_not(tmp_path):
    (tmp_path / "vocab.json").write_text("a")
    (tmp_path / "merges.txt").write_text("b")
    before = files_digest(tmp_path)
    (tmp_path / "README.md").write_text("a")
    assert files_digest(tmp_path) == before
    (tmp_path / "vocab.json").write_text("b")
    (tmp_path / "merges.txt").write_text("a")
    assert files_digest(tmp_path) != before


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen2"])
def test_the_digest_of_the_weights_is_what_loading_them_says(tiny_checkpoint, tmp_path, name):
    """Also of a checkpoint with what loading leaves out."""
    folder = shutil.copytree(tiny_checkpoint(name), tmp_path / name)
    for file in list(folder.glob("*.safetensors"))[:1]:
        tensors = load_file(file)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        if "model.embed_tokens.weight" in tensors and load_model_config(folder).tied_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file)
    model = CausalLm.allocate(load_model_config(folder), torch.float32, torch.device("cpu"))
    loaded = load_weights(model, folder).digest
    assert weights_digest(folder) == loaded
    assert CheckpointDigest.of(folder).weights == loaded
