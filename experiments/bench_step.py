"""How long an engine step takes on this CPU: ours, transformers', and the floor that the machine sets.

    python -m experiments.bench_step [--json FILE] [--model PATH] [--threads 1 2] [--rounds N] [--best]

All sides of a point take turns within one process, and so do the probes of the machine's speed: what disturbs one
disturbs all. Times are medians over the rounds, or with --best the fastest of them, for a machine that others use at
the same time; that goes for sides and probes alike. One warm-up round is not counted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import torch

from engine.model_config import load_model_config
from experiments.floor import Machine, MachineProbe, ModelCost, seconds
from experiments.step_sides import EngineSide, Side, Step, TransformersSide
from launcher.default_model import resolve_model

BATCHES: Final = (1, 8, 32)
CONTEXTS: Final = (128, 1024)
PROMPTS: Final = (512, 2048)


@dataclass(frozen=True)
class Point:
    """One shape of step. `context` counts the new tokens in."""

    kind: str  # "decode" or "prefill"
    batch: int
    context: int
    threads: int

    @property
    def label(self) -> str:
        return f"decode {self.batch:>2} x {self.context}" if self.kind == "decode" else f"prefill {self.context}"


@dataclass(frozen=True)
class Result:
    """Seconds of each side at a point, the floor, and the machine's speed at that time."""

    point: Point
    seconds: dict[str, float]
    floor: float
    machine: Machine


def points(threads: Sequence[int]) -> list[Point]:
    found = []
    for count in threads:
        found += [Point("decode", batch, context, count) for context in CONTEXTS for batch in BATCHES]
        found += [Point("prefill", 1, tokens, count) for tokens in PROMPTS]
    return found


Typical = Callable[[Sequence[float]], float]
"""Makes one time of several."""


def measure(point: Point, sides: Sequence[Side], cost: ModelCost, rounds: int, typical: Typical) -> Result:
    torch.set_num_threads(point.threads)
    probe = MachineProbe(_bytes_read(point, cost))
    steps = {side.name: _step_of(side, point) for side in sides}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            took = seconds(step)
            if number > 0:
                times[name].append(took)
        probe.measure()
    machine = probe.result(typical)
    return Result(point, {name: typical(taken) for name, taken in times.items()}, _floor(point, cost, machine), machine)


def _step_of(side: Side, point: Point) -> Step:
    return side.decode(point.batch, point.context) if point.kind == "decode" else side.prefill(point.context)


def _bytes_read(point: Point, cost: ModelCost) -> int:
    """What a step reads at least once; of a prompt's own K and V, which it has just written, none."""
    kv_bytes = cost.kv_bytes(point.batch, point.context) if point.kind == "decode" else 0
    return cost.weight_bytes + kv_bytes


def _floor(point: Point, cost: ModelCost, machine: Machine) -> float:
    if point.kind == "decode":
        return cost.decode_floor(machine, point.batch, point.context)
    return cost.prefill_floor(machine, point.context)


def header(names: Sequence[str]) -> str:
    columns = "".join(f"{name + ' ms':>25}" for name in names)
    ratios = f"{'ours/floor':>12}{'hf/ours':>9}{'GB/s':>7}{'GFLOP/s':>9}"
    return f"{'threads':>7}  {'step':<15}{columns}{'floor ms':>10}{ratios}"


def row(result: Result, ours: str, theirs: str) -> str:
    columns = "".join(f"{taken * 1e3:>25.1f}" for taken in result.seconds.values())
    mine = result.seconds[ours]
    return (
        f"{result.point.threads:>7}  {result.point.label:<15}{columns}{result.floor * 1e3:>10.1f}"
        f"{mine / result.floor:>12.2f}{result.seconds[theirs] / mine:>9.2f}"
        f"{result.machine.bandwidth / 1e9:>7.1f}{result.machine.peak / 1e9:>9.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="checkpoint folder, or the default model's name")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds at each point")
    parser.add_argument("--best", action="store_true", help="the fastest round instead of the median one")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    model = resolve_model(options.model)
    sides: list[Side] = [EngineSide(model, "cpu"), EngineSide(model, "reference"), TransformersSide(model)]
    cost = ModelCost(load_model_config(model))
    results = []
    sys.stdout.write(header([side.name for side in sides]) + "\n")
    for point in points(options.threads):
        results.append(measure(point, sides, cost, options.rounds, min if options.best else median))
        sys.stdout.write(row(results[-1], sides[0].name, sides[-1].name) + "\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
