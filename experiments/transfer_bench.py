"""How fast KV moves from KvSender to KvReceiver over loopback, against bare sockets that move the same frames.

    python -m experiments.transfer_bench [--tokens 16 512] [--rounds N] [--sides NAME ...] [--json FILE]

Each side has a sending end here and a receiving end in a process of its own. Every round each side moves the KV of all
requests, once and in turn; the clock runs at the sender from its first word to the other side's last. The first round
is a warm-up, is not counted, and ends with a comparison of both pools.

`both copies`: gathered from a paged pool, spliced into another, as kvsplice does; `splice`: sent as it lies, spliced
into a paged pool; `no copy`: sent as it lies, dropped on arrival. All processes keep freed memory, as workers do.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from experiments.transfer_load import Load, LoadPool, layer_bytes
from experiments.transfer_pair import Pair
from experiments.transfer_report import Report, figures_of
from experiments.transfer_sides import OURS, SIDES
from kernels.select import select_kernels
from kvtransfer.frames import TOGETHER_BYTES
from kvtransfer.steady_memory import settle_memory
from kvtransfer.worker_facts import KvLayout

ROUND_TOKENS: Final = 8192
"""Tokens of a round, about: 188 MB of the default model's KV, more than caches hold."""
MAX_REQUESTS: Final = 512


def measure(load: Load, sides: Sequence[str], rounds: int) -> Report:
    """Raises BenchError if a round goes wrong."""
    pool = LoadPool(load, select_kernels("auto", torch.device("cpu")), seed=1)
    pool.fill(seed=3)
    settle_memory()  # as a worker does
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(contextlib.closing(Pair(name, load, pool))) for name in sides}
        for pair in pairs.values():
            pair.run()
            pair.check()
        seconds = _take_turns(pairs, rounds)
    figures = figures_of(seconds, OURS, num_bytes=load.num_bytes, num_messages=load.num_messages)
    return Report(load.tokens, load.requests, load.together, load.frame_bytes, rounds, figures)


def _take_turns(pairs: dict[str, Pair], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(rounds):
        for name, pair in pairs.items():
            seconds[name].append(pair.run())
    return seconds


def load_of(layout: KvLayout, tokens: int) -> Load:
    """As many requests as make a round, within bounds; as many layers in a message as kvsplice puts into one."""
    requests = max(1, min(MAX_REQUESTS, ROUND_TOKENS // tokens))
    together = TOGETHER_BYTES // (2 * layer_bytes(layout, tokens))
    return Load(layout, tokens, requests, max(1, min(layout.num_layers, together)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if OURS not in options.sides:
        options.sides.insert(0, OURS)
    torch.set_num_threads(1)
    layout = KvLayout(options.layers, options.kv_heads, options.head_dim, options.dtype, options.block_size)
    reports = []
    for tokens in options.tokens:
        reports.append(measure(load_of(layout, tokens), options.sides, options.rounds))
        sys.stdout.write(f"{reports[-1].title()}\n\n{reports[-1].table()}\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.transfer_bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512, 2048], help="of a request: frame sizes")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds at each size")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], help="kvsplice always takes part")
    parser.add_argument("--layers", type=int, default=30, help="of the KV; the defaults are SmolLM2-135M's")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
