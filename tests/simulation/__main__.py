"""`python -m tests.simulation`: runs worlds, replays one, or counts which of the planted bugs are found.

--seconds S     fresh seeds for so long (what `make simulate` does)
--seed N        one world again, with its whole history
--mutants       the table and the score of docs/simulation.md
"""

import argparse
import itertools
import secrets
import sys
import time
from collections.abc import Sequence

from tests.simulation.errors import ViolationError
from tests.simulation.hunt import Hunt, hunt, hunt_mutant, shown
from tests.simulation.mutants import ALL, MOST_SEEDS, MUTANTS
from tests.simulation.mutation import Mutation
from tests.simulation.world import World

SEED_BITS = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if anything is wrong."""
    options = _parser().parse_args(argv)
    if options.seed is not None:
        return replay(options.seed)
    if options.mutants:
        return score(options.only or [mutant.name for mutant in ALL], options.seeds)
    return search(options.seconds, options.start)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="run fresh seeds for so long (default: 60)")
    parser.add_argument("--start", type=int, help="first seed (default: drawn)")
    parser.add_argument("--seed", type=int, help="replay this seed with its whole history")
    parser.add_argument("--mutants", action="store_true", help="plant each bug and look for it")
    parser.add_argument(
        "--seeds", type=int, default=MOST_SEEDS, help=f"most seeds for each bug (default: {MOST_SEEDS})"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these bugs only")
    return parser


def search(seconds: float, start: int | None) -> int:
    first = secrets.randbits(SEED_BITS) if start is None else start
    result = hunt(itertools.count(first), seconds)
    print(f"{result.num_worlds} worlds from seed {first} on in {result.seconds:.1f} s")
    if result.find is None:
        return 0
    print(result.find)
    return 1


def replay(seed: int) -> int:
    world = World(seed)
    print(world.config)
    try:
        world.run()
    except ViolationError as violation:
        print(*shown(world), f"seed {seed}: {violation}", sep="\n")
        return 1
    print(*shown(world), f"seed {seed}: all is well", sep="\n")
    return 0


def score(names: Sequence[str], num_seeds: int) -> int:
    """Returns 1 if one that has to be found survives."""
    print("| bug | where | found at seed | seconds |", "|---|---|---:|---:|", sep="\n")
    hunts = {mutant.name: _score_one(mutant, num_seeds) for mutant in ALL if mutant.name in names}
    found = {name for name, result in hunts.items() if result.find is not None}
    print(f"\n{len(found)} of {len(hunts)} found within {num_seeds} seeds each")
    missed = sorted({mutant.name for mutant in MUTANTS if mutant.name in hunts} - found)
    print(f"not found, and should be: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def _score_one(mutant: Mutation, num_seeds: int) -> Hunt:
    before = time.process_time()
    result = hunt_mutant(mutant, range(num_seeds))
    seconds = time.process_time() - before
    place = "survives" if result.find is None else str(result.find.seed)
    where = mutant.target.partition(":")[2]
    print(f"| {mutant.name}: {mutant.bug} | `{where}` | {place} | {seconds:.1f} |", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
