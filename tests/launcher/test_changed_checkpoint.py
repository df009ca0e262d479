"""A checkpoint folder that somebody writes to while `kvsplice generate` runs."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.offline import LLM
from launcher import generate as run
from launcher.errors import ChangedInputError
from launcher.generate_config import GenerateConfig
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save_tiny_model("smollm2", tmp_path_factory.mktemp("original"))


@pytest.fixture
def world(original, tmp_path):
    return World(original, tmp_path)


class World:
    """A run over one prompt of a checkpoint folder of its own."""

    def __init__(self, original, place) -> None:
        self.folder = shutil.copytree(original, place / "model")
        self.output = place / "out"
        (place / "in").write_text(json.dumps({"prompt": [10, 11], "max_tokens": 2}))
        self._config = GenerateConfig(
            model=str(self.folder),
            input=str(place / "in"),
            output=str(self.output),
            progress=False,
            dtype="float32",
            device="cpu",
            kv_cache_gib=0.01,
        )

    def generate(self) -> None:
        assert run.generate(self._config) == 0

    def change_tokenizer(self) -> None:
        file = self.folder / "tokenizer.json"
        file.write_text(" " + file.read_text())

    def change_weight(self) -> None:
        tensors = load_file(self.folder / "model.safetensors")
        tensors["model.norm.weight"][0] += 1
        new = self.folder / "new"
        save_file(tensors, new, metadata={"format": "pt"})
        new.rename(self.folder / "model.safetensors")  # as a download does: what is mapped already stays


CHANGES = [World.change_tokenizer, World.change_weight]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_the_model_is_loaded_ends_the_run(world, monkeypatch, change):
    of = LLM.of

    def load(config) -> LLM:
        change(world)
        return of(config)

    monkeypatch.setattr(LLM, "of", load)
    with pytest.raises(ModelError, match="has changed while it was loaded"):
        world.generate()
    assert world.output.read_bytes() == b""


@pytest.mark.parametrize("change", CHANGES)
def test_results_are_marked_with_what_was_loaded_whatever_has_become_of_it(world, monkeypatch, change):
    original = world.folder.with_name("before")

    def check_all(todo) -> None:  # the first thing behind the load
        shutil.copytree(world.folder, original)
        change(world)

    monkeypatch.setattr(run.Todo, "check_all", check_all)
    world.generate()
    monkeypatch.undo()
    results = world.output.read_bytes()
    with pytest.raises(ChangedInputError):
        world.generate()
    shutil.rmtree(world.folder)
    original.rename(world.folder)
    world.generate()
    assert world.output.read_bytes() == results
