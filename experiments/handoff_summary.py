"""What the hand-over from prefill to decode costs one request on an idle system. Arithmetic and text only.

    sent           token 1      token 2   token 3   token 4  ...
     |---- TTFT -----|--- gap ----|-- ITL --|-- ITL --|
     |-- time to second token ----|

The server's own share: `kv_transfer_exposed_seconds`, from the moment when all KV is computed to decode's word that it
has everything. A histogram gives a sum and a count, so that figure is a mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from experiments.markdown_table import markdown_table
from experiments.percentiles import percentile
from experiments.stream_record import Outcome, StreamRecord

EXPOSED_METRIC: Final = "kvsplice:kv_transfer_exposed_seconds"
MAX_GAP_RATIO: Final = 1.5
"""Demanded of the median stream: gap from token 1 to token 2 over its median ITL."""
MAX_EXPOSED_SHARE: Final = 0.05
"""Demanded: mean exposed transfer over the median time to the second token."""
MIN_CHUNKS: Final = 3
"""With fewer there is no ITL beside the first gap."""


@dataclass(frozen=True)
class Handoff:
    """One stream, seconds. `itl`: median of its gaps behind the first one."""

    ttft: float
    gap: float
    itl: float

    @property
    def second_token(self) -> float:
        return self.ttft + self.gap

    @property
    def gap_ratio(self) -> float:
        return self.gap / self.itl


@dataclass(frozen=True)
class HistogramTotal:
    """All that a histogram of the server has observed."""

    seconds: float
    count: float

    def since(self, before: "HistogramTotal") -> "HistogramTotal":
        return HistogramTotal(self.seconds - before.seconds, self.count - before.count)

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count > 0 else None


@dataclass(frozen=True)
class HandoffResult:
    """A whole run. `exposed` is None if the server has no such metric; `failures` are of streams that do not count."""

    handoffs: tuple[Handoff, ...]
    exposed: HistogramTotal | None
    failures: tuple[str, ...]

    @property
    def exposed_share(self) -> float | None:
        mean = None if self.exposed is None else self.exposed.mean
        return None if mean is None or not self.handoffs else mean / median(each.second_token for each in self.handoffs)

    @property
    def gap_ratio(self) -> float | None:
        return median(each.gap_ratio for each in self.handoffs) if self.handoffs else None


def handoff_of(record: StreamRecord) -> Handoff | None:
    """None if the stream did not finish or is too short to say anything."""
    times = record.chunk_times
    if record.outcome is not Outcome.FINISHED or record.ttft is None or len(times) < MIN_CHUNKS:
        return None
    gaps = [later - earlier for earlier, later in pairwise(times)]
    itl = median(gaps[1:])
    return Handoff(record.ttft, gaps[0], itl) if itl > 0 else None


def summarise(
    records: Sequence[StreamRecord], before: HistogramTotal | None, after: HistogramTotal | None
) -> HandoffResult:
    handoffs = [handoff_of(record) for record in records]
    failures = [
        record.failure or f"{record.outcome.value} with {len(record.chunk_times)} chunks"
        for record, handoff in zip(records, handoffs, strict=True)
        if handoff is None
    ]
    exposed = None if before is None or after is None else after.since(before)
    return HandoffResult(tuple(each for each in handoffs if each is not None), exposed, tuple(failures))


def histogram_total(metrics_text: str, name: str) -> HistogramTotal | None:
    """Sum and count of histogram `name` in Prometheus' text format, over all its labels; None if it is not there."""
    seconds, count = series_total(metrics_text, f"{name}_sum"), series_total(metrics_text, f"{name}_count")
    return None if seconds is None or count is None else HistogramTotal(seconds, count)


def series_total(metrics_text: str, series: str, label: str = "") -> float | None:
    """Sum of a series of Prometheus' text format over all its labels, or over those that have `label`; None if it is
    not there."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics_text.splitlines()
        if line.partition(" ")[0].partition("{")[0] == series and label in line
    ]
    return sum(values) if values else None


def handoff_table(result: HandoffResult) -> str:
    """Empty if no stream counts."""
    if not result.handoffs:
        return ""
    rows = [
        _row("TTFT ms", result.handoffs, lambda each: each.ttft * 1e3),
        _row("time to second token ms", result.handoffs, lambda each: each.second_token * 1e3),
        _row("gap token 1 to 2 ms", result.handoffs, lambda each: each.gap * 1e3),
        _row("median ITL of the rest ms", result.handoffs, lambda each: each.itl * 1e3),
        _row("gap / ITL", result.handoffs, lambda each: each.gap_ratio, digits=2),
    ]
    return markdown_table(("one request at a time", "median", "p90"), rows)


def _row(name: str, handoffs: Sequence[Handoff], value: Callable[[Handoff], float], digits: int = 1) -> list[str]:
    values = [value(each) for each in handoffs]
    return [name, f"{median(values):.{digits}f}", f"{percentile(values, 90):.{digits}f}"]


def verdict_lines(result: HandoffResult) -> list[str]:
    """What is demanded, and whether it is so."""
    failures = [f"FAILED: {failure}" for failure in result.failures]
    if result.gap_ratio is None:
        return failures
    return [_verdict("gap / ITL, median", result.gap_ratio, MAX_GAP_RATIO, "{:.2f}"), _exposed_line(result), *failures]


def _exposed_line(result: HandoffResult) -> str:
    if result.exposed is None or result.exposed.mean is None or result.exposed_share is None:
        return f"exposed transfer: unknown, the server's /metrics have nothing in {EXPOSED_METRIC}"
    mean = f"mean {result.exposed.mean * 1e3:.1f} ms of {result.exposed.count:.0f} hand-overs"
    name = f"exposed transfer, {mean}, over the median time to the second token"
    return _verdict(name, result.exposed_share, MAX_EXPOSED_SHARE, "{:.1%}")


def _verdict(name: str, value: float, most: float, form: str) -> str:
    return (
        f"{name}: {form.format(value)}, demanded at most {form.format(most)}: {'met' if value <= most else 'NOT MET'}"
    )
