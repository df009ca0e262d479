"""Worlds of fixed seeds hold, are the same each time, and do contain what they are meant to survive."""

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulation.__main__ import main
from tests.simulation.clients import State
from tests.simulation.config import Climate
from tests.simulation.faults import Fault
from tests.simulation.hunt import hunt, run_seed, shown
from tests.simulation.mutants import MUTANTS
from tests.simulation.mutation import applied
from tests.simulation.worker_node import DecodeNode
from tests.simulation.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 60.0
FEWEST_WORLDS = 20
"""On the slowest machine; an idle core runs several hundred."""
FIRST_SEED = 0
REPLAYED = 12
MOST_LOOKED_AT = 400


def test_worlds_hold(record_property):
    result = hunt(itertools.count(FIRST_SEED), SECONDS)
    record_property("num_worlds", result.num_worlds)
    print(f"{result.num_worlds} worlds in {result.seconds:.1f} s")
    assert result.find is None, f"\n{result.find}"
    assert result.num_worlds >= FEWEST_WORLDS


def test_a_seed_makes_one_history():
    for seed in range(REPLAYED):
        assert _history(seed) == _history(seed)


def test_another_process_makes_the_same_history():
    """Also where strings hash otherwise."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(REPLAYED)]
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert result.stdout.splitlines()[1:-1] == _history(REPLAYED)


def test_other_seeds_make_other_histories():
    assert len({tuple(_history(seed)) for seed in range(REPLAYED)}) == REPLAYED


def test_all_that_may_happen_does_happen():
    """The negative control: a fault that never strikes proves nothing."""
    seen: Counter = Counter()
    wanted = {*Fault, *Climate, *State, "a broken connection", "a lost message", "two gateways"}
    wanted -= {State.WAITING}
    wanted |= {"a damaged frame", "a lost frame", "a resend", "a local prompt", "a group", "a copied block"}
    wanted |= {"swapped out", "swapped in", "no room to swap"}
    for seed in range(MOST_LOOKED_AT):
        _note(World(seed), seen)
        if wanted <= seen.keys():
            return
    assert wanted <= seen.keys(), f"never seen: {wanted - seen.keys()}"


def test_the_printed_seed_shows_the_bug_again(capsys):
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "skip-the-free")
    with applied(mutant):
        find = run_seed(0)
        assert find is not None
        assert "--seed 0" in str(find)
        assert main(["--seed", "0"]) == 1
    assert find.violation in capsys.readouterr().out
    assert main(["--seed", "0"]) == 0


def test_a_search_ends_in_time_and_counts(capsys):
    start = time.perf_counter()
    assert main(["--seconds", "0.01", "--start", "3"]) == 0
    assert time.perf_counter() - start < SECONDS
    assert "1 worlds from seed 3 on" in capsys.readouterr().out


def _history(seed: int) -> list[str]:
    world = World(seed)
    world.run()
    return shown(world)


def _note(world: World, seen: Counter) -> None:
    world.run()
    texts = [what for _, who, what in world.timeline.trace if who == "fault"]
    seen.update(fault for fault in Fault for text in texts if text.startswith(f"{fault.value} "))
    seen.update([world.config.climate, *(client.state for client in world.clients)])
    seen["a broken connection"] += world.network.num_broken
    seen["a lost message"] += world.network.num_lost
    seen["a damaged frame"] += world.noise.num_damaged
    seen["a lost frame"] += world.noise.num_lost
    decode = [node for node in world.nodes.values() if isinstance(node, DecodeNode)]
    seen["a resend"] += sum(node.receiver.counts.num_resends for node in decode)
    loads = [node.scheduler.load() for node in decode]
    seen["swapped out"] += sum(load.swap.num_out for load in loads)
    seen["swapped in"] += sum(load.swap.num_in for load in loads)
    seen["no room to swap"] += sum(load.swap.num_refused for load in loads)
    seen["a local prompt"] += world.invariants.num_local
    seen["a group"] += world.invariants.num_groups
    seen["a copied block"] += sum(node.engine.kv_cache.num_copied for node in decode)
    seen["two gateways"] += world.config.num_gateways > 1
    for name in [name for name, count in seen.items() if not count]:
        del seen[name]
