"""What sharing KV saves: medians, ratios, and whether they are as demanded. Arithmetic and text only."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from experiments.markdown_table import markdown_table

MIN_SPEEDUP: Final = 5.0
"""Demanded: median TTFT without the prefix in the cache over that with it."""
MAX_CHOICES_COST: Final = 1.3
"""Demanded: time and bytes of prefill and transfer for several choices over those for one, less than this."""


@dataclass(frozen=True)
class PrefixPairs:
    """TTFTs in one mode, seconds, pair by pair; `cached`: the least number of tokens found in the second of a pair."""

    mode: str
    fresh: tuple[float, ...]
    shared: tuple[float, ...]
    cached: int

    @property
    def speedup(self) -> float:
        return median(self.fresh) / median(self.shared)


@dataclass(frozen=True)
class ChoicePairs:
    """Calls for one choice and for `num_choices` of fresh prompts, in turn. Seconds until every choice has its second
    token; KV bytes a call that prefill workers sent, None where nothing is sent."""

    mode: str
    num_choices: int
    one: tuple[float, ...]
    many: tuple[float, ...]
    one_bytes: float | None
    many_bytes: float | None

    @property
    def time_cost(self) -> float:
        return median(self.many) / median(self.one)

    @property
    def byte_cost(self) -> float | None:
        return self.many_bytes / self.one_bytes if self.one_bytes and self.many_bytes is not None else None


@dataclass(frozen=True)
class SharingResult:
    """A whole run. `refused`: why calls for several choices could not be measured, empty if they were."""

    prefixes: tuple[PrefixPairs, ...]
    choices: tuple[ChoicePairs, ...]
    refused: str = ""


def prefix_table(prefixes: Sequence[PrefixPairs]) -> str:
    rows = [
        [pairs.mode, f"{median(pairs.fresh) * 1e3:.1f}", f"{median(pairs.shared) * 1e3:.1f}", f"{pairs.speedup:.1f}"]
        for pairs in prefixes
    ]
    return markdown_table(("mode", "TTFT ms, nothing cached", "TTFT ms, prefix cached", "ratio"), rows)


def choices_table(choices: Sequence[ChoicePairs]) -> str:
    rows = [
        [
            pairs.mode,
            f"{median(pairs.one) * 1e3:.1f}",
            f"{median(pairs.many) * 1e3:.1f}",
            f"{pairs.time_cost:.2f}",
            _mib(pairs.one_bytes),
            _mib(pairs.many_bytes),
            "-" if pairs.byte_cost is None else f"{pairs.byte_cost:.2f}",
        ]
        for pairs in choices
    ]
    many = f"n={choices[0].num_choices}"
    header = ("mode", "all second tokens ms, n=1", many, "ratio", "KV sent MiB, n=1", many, "ratio")
    return markdown_table(header, rows)


def verdicts(result: SharingResult) -> list[tuple[bool, str]]:
    """What is demanded: whether it is so, and a line that says it."""
    lines = [
        _verdict(pairs.speedup >= MIN_SPEEDUP, f"{pairs.mode}: cached TTFT {pairs.speedup:.1f}x sooner", ">= 5x")
        for pairs in result.prefixes
    ]
    for pairs in result.choices:
        costs = {"time": pairs.time_cost, "KV bytes": pairs.byte_cost}
        lines += [
            _verdict(
                cost < MAX_CHOICES_COST, f"{pairs.mode}: n={pairs.num_choices} costs {cost:.2f}x the {name}", "< 1.3x"
            )
            for name, cost in costs.items()
            if cost is not None
        ]
    if result.refused:
        lines.append((False, f"several choices NOT MEASURED: {result.refused}"))
    return lines


def _verdict(is_met: bool, what: str, demanded: str) -> tuple[bool, str]:
    return is_met, f"{what}, demanded {demanded}: {'met' if is_met else 'NOT MET'}"


def _mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 20):.2f}"
