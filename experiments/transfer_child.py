"""The receiving process of the transfer benchmark: `python -m experiments.transfer_child`, started by transfer_bench.

Says its endpoint, then obeys one line at a time and answers each with one: `round N` (answered "go" when the round may
begin, then "done"), `checksum` (answered with the pool's). Ends with its standard input.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec
import torch

from experiments.transfer_ends import ReceivingEnd
from experiments.transfer_load import Load, LoadPool
from experiments.transfer_sides import SIDES
from kernels.select import select_kernels
from kvtransfer.steady_memory import settle_memory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.transfer_child")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("load", help="a Load as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = msgspec.json.decode(options.load, type=Load)
    pool = LoadPool(load, select_kernels("auto", torch.device("cpu")), seed=2)
    end = SIDES[options.side].receiving_end(load, pool)
    settle_memory()  # as a worker does
    _say(end.endpoint)
    for line in sys.stdin:
        _obey(line.split(), end, pool)
    end.close()
    return 0


def _obey(words: list[str], end: ReceivingEnd, pool: LoadPool) -> None:
    if words == ["checksum"]:
        _say(str(pool.checksum()))
        return
    number = int(words[1])
    end.prepare(number)
    _say("go")
    end.receive_round(number)
    _say("done")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
