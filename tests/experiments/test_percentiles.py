"""Percentiles against numpy's, and what counts as a drift."""

import random

import numpy
import pytest

from experiments.percentiles import drift, is_steady, percentile, spread_of


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_as_numpy_does_it(count, percent):
    dice = random.Random(count)
    values = [dice.random() for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_a_spread_is_in_milliseconds():
    spread = spread_of([0.004, 0.001, 0.003, 0.002, 0.1])
    assert (spread.count, spread.p50_ms, spread.max_ms) == (5, 3.0, 100.0)
    assert spread.p90_ms == pytest.approx(numpy.percentile([1, 2, 3, 4, 100], 90))
    assert len(spread.ecdf_ms) == 101
    assert list(spread.ecdf_ms) == sorted(spread.ecdf_ms)
    assert spread_of([]) is None


def test_a_drift_compares_the_last_third_with_the_first():
    timed = [(0.5, 1.0), (1.5, 50.0), (2.5, 3.0)]
    assert drift(timed, 0.0, 3.0) == 3.0
    assert not is_steady(3.0)
    assert not is_steady(1 / 3)
    assert is_steady(1.2)
    assert drift(timed[:2], 0.0, 3.0) is None
    assert not is_steady(None)
