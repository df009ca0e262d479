"""From the seconds of a transfer benchmark's rounds to its figures and its tables. No socket, tensor or clock.

All sides take turns within a round, so a ratio is the median of the rounds' own ratios: what disturbs the machine for
longer than a round disturbs both sides of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from experiments.markdown_table import markdown_table


@dataclass(frozen=True)
class Figures:
    """One side at one size of frames. `ours`: kvsplice's speed over this side's."""

    side: str
    gigabytes_per_second: float
    microseconds_per_message: float
    ours: float


@dataclass(frozen=True)
class Report:
    """All sides at one size of frames."""

    tokens: int
    requests: int
    together: int  # layers in one message
    frame_bytes: int
    rounds: int
    figures: tuple[Figures, ...]

    def title(self) -> str:
        return (
            f"{self.requests} requests of {self.tokens} tokens, {self.together} of their layers and K and V of"
            f" {self.frame_bytes:,} bytes a message, medians of {self.rounds} rounds:"
        )

    def table(self) -> str:
        rows = [
            (
                figures.side,
                f"{figures.gigabytes_per_second:.2f}",
                f"{figures.microseconds_per_message:.0f}",
                f"{figures.ours:.2f}",
            )
            for figures in self.figures
        ]
        return markdown_table(("side", "GB/s", "us / message", "kvsplice / side"), rows)


def figures_of(
    seconds: Mapping[str, Sequence[float]], ours: str, *, num_bytes: int, num_messages: int
) -> tuple[Figures, ...]:
    """`seconds`: of each round, by side; `num_bytes` and `num_messages`: of one round."""
    return tuple(
        Figures(
            side,
            gigabytes_per_second=num_bytes / median(taken) / 1e9,
            microseconds_per_message=median(taken) / num_messages * 1e6,
            ours=median(theirs / mine for theirs, mine in zip(taken, seconds[ours], strict=True)),
        )
        for side, taken in seconds.items()
    )
