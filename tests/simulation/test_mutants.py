"""The simulation finds bugs: those that are planted here. The whole table is in docs/simulation.md."""

import re
import types
from pathlib import Path

import pytest

from tests.simulation.hunt import hunt_mutant
from tests.simulation.mutants import ALL, MUTANTS
from tests.simulation.mutation import Mutation, StaleMutationError, applied, function_of, mutated_code

DOCUMENT = (Path(__file__).resolve().parent.parent.parent / "docs" / "simulation.md").read_text()
QUICK = (
    "skip-the-free",
    "free-while-lent",
    "ignore-cancel",
    "write-to-shared",
    "copy-forgotten",
    "free-for-all-owners",
    "leader-takes-all-along",
    "prefill-last-block",
    "prefill-keeps-closed",
    "no-first-token-to-decode",
    "decode-last-block",
    "resume-one-late",
    "credit-before-copy",
    "credit-too-much",
    "count-credits-twice",
    "done-before-readable",
    "stale-offers-kept",
    "no-sweep-when-idle",
    "decode-not-cancelled",
    "double-end",
    "sequence-not-counted",
)
"""Found by one of the first few seeds."""
QUICK_SEEDS = 12


def by_name(name: str) -> Mutation:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def meaning(code: types.CodeType) -> tuple:
    """What it does, wherever it stands."""
    constants = [meaning(part) if isinstance(part, types.CodeType) else part for part in code.co_consts]
    return (code.co_code, code.co_names, constants)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_code_that_it_changes_is_there(mutant):
    assert meaning(mutated_code(mutant)) != meaning(function_of(mutant).__code__)


@pytest.mark.parametrize("name", QUICK)
def test_is_found_soon(name):
    assert hunt_mutant(by_name(name), range(QUICK_SEEDS)).find is not None


def test_there_are_enough_and_all_are_published():
    names = [mutant.name for mutant in ALL]
    assert len(names) == len(set(names))
    assert len(MUTANTS) >= 20
    published = re.findall(r"^\| ([a-z-]+): ", DOCUMENT, re.MULTILINE)
    assert sorted(published) == sorted(names)


def test_a_bug_is_taken_out_again():
    mutant = by_name("double-end")
    function = function_of(mutant)
    sound = function.__code__
    with applied(mutant):
        assert function.__code__ is not sound
    assert function.__code__ is sound


@pytest.mark.parametrize(
    ("target", "old"),
    [("gateway.flights:Flights.end", "not there"), ("gateway.flights:Flights.gone", "pass")],
)
def test_a_mutation_that_has_lost_its_place_says_so(target, old):
    with pytest.raises(StaleMutationError, match="lost"):
        mutated_code(Mutation("lost", "", target, old, ""))
