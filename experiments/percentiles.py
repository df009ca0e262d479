"""Percentiles of times, and whether they drift. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

STEADY_WITHIN: Final = 1.25
"""The last third's median over the first third's, either way: more is a drift."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks in proportion, as numpy's default does. `values` need not be sorted."""
    assert values, "a percentile of nothing"
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Spread:
    """How times are distributed, in milliseconds. `ecdf`: the percentiles 0, 1, ..., 100."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    ecdf_ms: tuple[float, ...]


def spread_of(seconds: Sequence[float]) -> Spread | None:
    """None if there is nothing to spread."""
    if not seconds:
        return None
    ecdf = tuple(percentile(seconds, percent) * 1e3 for percent in range(101))
    return Spread(len(seconds), ecdf[50], ecdf[90], ecdf[99], ecdf[100], ecdf)


def drift(timed: Sequence[tuple[float, float]], start: float, stop: float) -> float | None:
    """Median of the last third of [start, stop] over that of the first; `timed` is (when, value). None if a third is
    empty."""
    third = (stop - start) / 3
    first = [value for when, value in timed if when < start + third]
    last = [value for when, value in timed if when >= stop - third]
    if not first or not last or median(first) == 0:
        return None
    return median(last) / median(first)


def is_steady(drifted: float | None) -> bool:
    return drifted is not None and 1 / STEADY_WITHIN <= drifted <= STEADY_WITHIN
