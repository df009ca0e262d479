"""Clusters that several end-to-end tests share: starting one costs seconds."""

import pytest

from tests.e2e.cluster import Cluster, ClusterFlags, running_cluster
from tests.e2e.fault_run import FaultRow, markdown
from tests.tiny_models import save_tiny_model

FAULT_ROWS: pytest.StashKey[list[FaultRow]] = pytest.StashKey()


def pytest_configure(config):
    config.stash[FAULT_ROWS] = []


def pytest_terminal_summary(terminalreporter, config):
    """What each fault has cost, where the whole run is summed up."""
    if rows := config.stash[FAULT_ROWS]:
        terminalreporter.section("faults")
        terminalreporter.write_line(markdown(rows))


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


TINY_WORKERS = ("--dtype", "float32", "--kv-cache-gib", "0.05")
PATIENT_GATEWAY = ("--failover-timeout-s", "90")
"""On a busy machine a process takes its time to start."""


@pytest.fixture(scope="module")
def tiny_cluster(tiny_model, tmp_path_factory):
    flags = ClusterFlags(tiny_model, TINY_WORKERS, gateway=PATIENT_GATEWAY)
    with running_cluster(flags, tmp_path_factory.mktemp("tiny")) as running:
        yield running


@pytest.fixture
def healthy(tiny_cluster):
    """The module's cluster with all roles running, whatever the test before has done to it; empty again afterwards."""
    yield tiny_cluster
    tiny_cluster.wait_ready()
    tiny_cluster.wait_pools_empty()


@pytest.fixture
def stopped(tiny_model, tmp_path):
    """A cluster with nothing started; whatever the test starts is stopped."""
    cluster = Cluster(ClusterFlags(tiny_model, TINY_WORKERS), tmp_path)
    try:
        yield cluster
    finally:
        try:
            cluster.stop_all()
        finally:
            print(cluster.logs())
