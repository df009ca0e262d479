"""How long each kernel takes on a device: ours against its floor, against torch's SDPA, and FlashInfer where installed.

    python -m experiments.kernel_bench [--device cuda|cpu] [--kernels NAME] [--threads N] [--only TEXT] [--rounds N]
                                       [--best] [--json FILE]

The floor is what the kernel has to move over the bandwidth that a large copy reaches here, or its FLOPs over the rate
of a large product, whichever takes longer. Whoever attends beside us has to give the same result first. All sides of a
case and both probes take turns; times are medians over the rounds, or with --best the fastest of them, each of a call
by itself with cold caches. Exit code 2 without a CUDA device, unless `--device cpu` asks for the CPU's kernels.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import torch

from experiments.kernel_cases import FLOAT8, Bench, Case, Rows
from experiments.kernel_device import BenchDevice
from experiments.kernel_work import LLAMA_8B, SMOLLM2, ModelShape, Speeds
from kernels.errors import KernelsError
from kernels.face import Kernels
from kernels.select import BACKEND_NAMES, select_kernels

MODELS: Final = (LLAMA_8B, SMOLLM2)
LARGEST_DIFFERENCE: Final = 0.02
"""Of two attentions in bfloat16, relative to the length of the result."""
OURS: Final = "ours"
OTHERS: Final = ("sdpa", "flashinfer")


@dataclass(frozen=True)
class Result:
    """Seconds of one case. `others`: those that could do it."""

    model: str
    kernel: str
    shape: str
    stored: str
    seconds: float
    floor: float
    bound: str
    others: dict[str, float]
    speeds: Speeds


def bench_of(model: ModelShape, kernels: Kernels, device: torch.device) -> Bench:
    """Shapes that fill a GPU, or smaller ones for a CPU. The CPU's native kernels have no float8."""
    decodes: tuple[Rows, ...] = (((1, 1024),), ((1, 1024),) * 8)
    prefills: tuple[Rows, ...] = (((512, 512),), ((128, 1024),))
    if device.type == "cuda":
        decodes = (((1, 8192),), ((1, 1024),) * 32, ((1, 4096),) * 64)
        prefills = (((2048, 2048),), ((512, 8192),), ((256, 256),) * 8)
    formats = (torch.bfloat16,) if kernels.name == "cpu" else (torch.bfloat16, FLOAT8)
    return Bench(model, kernels, device, decodes, prefills, tokens=512, formats=formats)


def measure(case: Case, model: str, device: BenchDevice) -> Result:
    """Raises ValueError if another attention gives another result: one of the two would be timed for nothing."""
    for name, attend in case.others.items():
        check_same(case, name, attend())
    others, speeds = device.take_turns({OURS: case.ours, **case.others})
    seconds = others.pop(OURS)
    stored = str(case.stored).removeprefix("torch.")
    floor, bound = case.work.floor(speeds), case.work.bound(speeds)
    return Result(model, case.kernel, case.shape, stored, seconds, floor, bound, others, speeds)


def check_same(case: Case, name: str, theirs: torch.Tensor) -> None:
    ours = case.ours().float()
    difference = ((theirs.float() - ours).norm() / ours.norm()).item()
    if not difference < LARGEST_DIFFERENCE:
        raise ValueError(f"{case.kernel} {case.shape}: {name} differs from ours by {difference:.3f}")


HEADER: Final = (
    f"{'model':13} {'kernel':14} {'shape':15} {'pool':13} {'ours us':>9} {'floor us':>9} {'ours/floor':>10} "
    f"{'bound by':9}{'GB/s':>7}{'TFLOP/s':>9}" + "".join(f"{name + ' us':>14}{name + '/ours':>16}" for name in OTHERS)
)


def line(result: Result) -> str:
    speeds = result.speeds
    text = (
        f"{result.model:13} {result.kernel:14} {result.shape:15} {result.stored:13} {result.seconds * 1e6:9.1f} "
        f"{result.floor * 1e6:9.1f} {result.seconds / result.floor:10.2f} {result.bound:9}"
        f"{speeds.bandwidth / 1e9:7.0f}{speeds.peak / 1e12:9.2f}"
    )
    for name in OTHERS:
        theirs = result.others.get(name)
        text += f"{'-':>14}{'-':>16}" if theirs is None else f"{theirs * 1e6:14.1f}{theirs / result.seconds:16.2f}"
    return text


def missing(device: str) -> str | None:
    """Why nothing can be measured here, or None."""
    if device == "cuda" and not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
        return f"no CUDA device: {built}. --device cpu times the CPU's kernels instead"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.kernel_bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", choices=BACKEND_NAMES, default="auto", help="the backend; auto takes the best")
    parser.add_argument("--only", default="", help="only cases whose model or kernel has this text in its name")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on a CPU")
    parser.add_argument("--rounds", type=int, default=20, help="counted calls of each side")
    parser.add_argument("--best", action="store_true", help="the fastest call instead of the median one")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    if (reason := missing(options.device)) is not None:
        sys.stderr.write(f"kernel_bench: {reason}\n")
        return 2
    device = torch.device(options.device)
    try:
        kernels = select_kernels(options.kernels, device)
    except KernelsError as error:
        sys.stderr.write(f"kernel_bench: {error}\n")
        return 2
    torch.set_num_threads(options.threads)
    _run(options, kernels, BenchDevice(device, options.rounds, min if options.best else median))
    return 0


def _run(options: argparse.Namespace, kernels: Kernels, device: BenchDevice) -> None:
    about = {"device": device.name, "kernels": kernels.name, "torch": torch.__version__}
    sys.stdout.write("; ".join(f"{key}: {value}" for key, value in about.items()) + f"\n{HEADER}\n")
    results = []
    for model in MODELS:
        for case in bench_of(model, kernels, device.device).cases():
            if options.only not in f"{model.name} {case.kernel}":
                continue
            results.append(measure(case, model.name, device))
            sys.stdout.write(line(results[-1]) + "\n")
            sys.stdout.flush()
    if options.json is not None:
        found = {**about, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
