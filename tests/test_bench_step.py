"""The arithmetic of the floor, and that every side of the benchmark does the work it is timed for."""

import json

import pytest
import torch

from engine.model_config import load_model_config
from experiments import bench_step
from experiments.bench_step import Point, points
from experiments.floor import Machine, MachineProbe, ModelCost
from experiments.step_sides import EngineSide, TransformersSide
from tests.tiny_models import save_tiny_model

# transformers renames this argument; the old name is what the oldest release that we take knows.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

MACHINE = Machine(bandwidth=1e9, peak=1e12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model("llama2", tmp_path_factory.mktemp("tiny"), torch.bfloat16)


def test_floor_of_smollm2(smollm2):
    cost = ModelCost(load_model_config(smollm2))
    weights = 30 * 3_538_944 + 49_152 * 576
    kv_bytes = 8 * 128 * 30 * 2 * 192 * 2
    assert cost.decode_floor(MACHINE, 8, 128) == pytest.approx((2 * weights + kv_bytes) / 1e9)
    slow = Machine(bandwidth=1e12, peak=1e9)
    assert cost.decode_floor(slow, 8, 128) == pytest.approx(2 * 8 * weights / 1e9 + kv_bytes / 1e12)
    linear = 2 * (512 * 30 * 3_538_944 + 49_152 * 576)
    assert cost.prefill_floor(MACHINE, 512) == pytest.approx((linear + 4 * 512 * 513 / 2 * 576 * 30) / 1e12)


def test_points_cover_all_shapes_on_each_number_of_threads():
    found = points([1, 2])
    assert len(set(found)) == len(found) == 16
    assert Point("decode", 32, 1024, 2) in found
    assert Point("prefill", 1, 2048, 1) in found


def test_all_sides_pick_the_same_tokens(tiny):
    """Prompts are the same on all sides, so the first token must be (bfloat16 leaves room for a tie, not here)."""
    sides = [EngineSide(tiny, "cpu"), EngineSide(tiny, "reference"), TransformersSide(tiny)]
    answers = [side.prefill(20)() for side in sides]
    assert answers[0] == answers[1] == answers[2]
    for side in sides:
        step = side.decode(3, 40)
        assert len(step()) == 3
        assert step() == step(), "a step leaves everything as it was"


def test_a_whole_run_prints_a_line_a_point_and_writes_json(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_step, "points", lambda threads: [Point("decode", 2, 33, 1), Point("prefill", 1, 40, 1)])
    before = torch.get_num_threads()
    try:
        arguments = ["--model", str(tiny), "--rounds", "1", "--best", "--json", str(tmp_path / "out.json")]
        assert bench_step.main(arguments) == 0
    finally:
        torch.set_num_threads(before)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    results = json.loads((tmp_path / "out.json").read_text())
    assert [result["point"]["kind"] for result in results] == ["decode", "prefill"]
    assert all(len(result["seconds"]) == 3 and result["floor"] > 0 for result in results)


def test_the_probe_takes_what_is_typical():
    probe = MachineProbe(1 << 20)
    probe.measure()
    probe.measure()
    assert probe.result(min).bandwidth >= probe.result(max).bandwidth > 0


def test_the_probe_reads_as_much_as_the_step(smollm2, monkeypatch):
    cost, sizes = ModelCost(load_model_config(smollm2)), []

    class Probe:
        def __init__(self, read_bytes):
            sizes.append(read_bytes)

        def measure(self):
            pass

        def result(self, typical):
            return MACHINE

    monkeypatch.setattr(bench_step, "MachineProbe", Probe)
    before = torch.get_num_threads()
    try:
        for point in (Point("decode", 8, 1024, 1), Point("prefill", 1, 512, 1)):
            bench_step.measure(point, [], cost, 1, min)
    finally:
        torch.set_num_threads(before)
    weights = 2 * (30 * 3_538_944 + 49_152 * 576)
    assert sizes == [weights + 8 * 1024 * 30 * 2 * 192 * 2, weights]
