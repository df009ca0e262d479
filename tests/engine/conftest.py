"""Tiny checkpoints on disk, one folder an architecture, made once a session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.loading import LoadedModel, load
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by name. Read only."""
    return cache(lambda name: save_tiny_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session", params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Each backend of a CPU by name: what uses it runs once with each."""
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_loaded(tiny_checkpoint: Callable[[str], Path], kernels: str) -> Callable[[str], LoadedModel]:
    """A tiny model as the engine loads it on the CPU, by name."""
    return cache(lambda name: load(tiny_checkpoint(name), dtype="auto", device="cpu", kernels=kernels))
