"""Clusters that several end-to-end tests share: starting one costs seconds."""

import pytest

from tests.e2e.cluster import ClusterFlags, running_cluster
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def cluster(smollm2, tmp_path_factory):
    """SmolLM2 in float32 with the default chunk (512) and block (16) sizes."""
    with running_cluster(ClusterFlags(smollm2), tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def small_chunk_cluster(smollm2, tmp_path_factory):
    """SmolLM2 in float32, chunks of 64 tokens, blocks of 16 on prefill and 32 on decode."""
    flags = ClusterFlags(
        smollm2, prefill=("--max-num-batched-tokens", "64", "--block-size", "16"), decode=("--block-size", "32")
    )
    with running_cluster(flags, tmp_path_factory.mktemp("small-chunk-cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model of a millisecond a step that takes long requests: for what is about processes and not about tokens."""
    return save_tiny_model("smollm2", tmp_path_factory.mktemp("tiny-model"), max_position_embeddings=16384)
