"""From the records of a mixed load to its figures. No socket or clock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from experiments.percentiles import Spread, drift, spread_of
from experiments.stream_record import Outcome, StreamRecord


@dataclass(frozen=True)
class PhaseRecords:
    """All that happened in one phase. What counts lies in the window [start, stop]; before it the load settles."""

    start: float
    stop: float
    streams: tuple[StreamRecord, ...]
    long_prompts: tuple[StreamRecord, ...]
    loop_lags: tuple[float, ...]  # seconds by which the client's own timer was late

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Ends:
    """How many streams ended how, and what the first failures were."""

    finished: int
    cut: int
    failed: int
    failures: tuple[str, ...]


@dataclass(frozen=True)
class StreamSummary:
    """The short streams of a phase. Tokens are chunks with content times the mean tokens of a chunk."""

    itl: Spread | None
    first_gap: Spread | None  # token 1 to token 2
    ttft: Spread | None
    tokens_per_second: float
    tokens_per_chunk: float | None  # mean over finished streams; None: the server does not say
    max_tokens_per_chunk: float | None  # of the stream with the most
    drift: float | None  # of the ITL over the window
    longest_open_gap_ms: float
    prompt_tokens: tuple[int, ...]  # all lengths that the server reported
    loop_lag: Spread | None
    ends: Ends


@dataclass(frozen=True)
class LongSummary:
    """The long prompts of a phase."""

    ttft: Spread | None
    prompt_tokens: tuple[int, ...]
    late: Spread | None  # sent behind the schedule
    sent_per_second: float
    wanted_per_second: float | None  # by the schedule, if there is one
    ends: Ends


def summarise_streams(phase: PhaseRecords) -> StreamSummary:
    streams, start, stop = phase.streams, phase.start, phase.stop
    gaps = [gap for record in streams for gap in record.gaps(start, stop)]
    first_gaps = [gap for record in streams if (gap := record.first_gap(start, stop)) is not None]
    per_chunk = [ratio for record in streams if (ratio := record.tokens_per_chunk) is not None]
    num_chunks = sum(start <= when <= stop for record in streams for when in record.chunk_times)
    return StreamSummary(
        itl=spread_of([length for _, length in gaps]),
        first_gap=spread_of(first_gaps),
        ttft=spread_of(_ttfts(streams, start, stop)),
        tokens_per_second=num_chunks * (mean(per_chunk) if per_chunk else 1.0) / phase.seconds,
        tokens_per_chunk=mean(per_chunk) if per_chunk else None,
        max_tokens_per_chunk=max(per_chunk, default=None),
        drift=drift(gaps, start, stop),
        longest_open_gap_ms=max((record.open_gap for record in streams), default=0.0) * 1e3,
        prompt_tokens=_lengths(streams),
        loop_lag=spread_of(phase.loop_lags),
        ends=_ends(streams),
    )


def summarise_long(
    records: Sequence[StreamRecord], start: float, stop: float, wanted_per_second: float | None = None
) -> LongSummary:
    return LongSummary(
        ttft=spread_of(_ttfts(records, start, stop)),
        prompt_tokens=_lengths(records),
        late=spread_of([record.late_by for record in records]),
        sent_per_second=len(records) / (stop - start),
        wanted_per_second=wanted_per_second,
        ends=_ends(records),
    )


def summarise_idle(records: Sequence[StreamRecord]) -> LongSummary:
    """Of prompts that went out one by one, at whatever times."""
    spent = sum(record.ended_at - record.sent_at for record in records)
    summary = summarise_long(records, records[0].sent_at, records[-1].ended_at)
    return replace(summary, sent_per_second=len(records) / spent)


def _ttfts(records: Sequence[StreamRecord], start: float, stop: float) -> list[float]:
    """Of streams sent within the window. One that has not answered when it is cut counts with the time it waited:
    leaving it out would make a stall look good."""
    within = [record for record in records if start <= record.sent_at <= stop and record.outcome is not Outcome.FAILED]
    return [record.open_gap if record.ttft is None else record.ttft for record in within]


def _lengths(records: Sequence[StreamRecord]) -> tuple[int, ...]:
    return tuple(sorted({record.prompt_tokens for record in records if record.prompt_tokens is not None}))


def _ends(records: Sequence[StreamRecord]) -> Ends:
    counts = Counter(record.outcome for record in records)
    failures = Counter(record.failure for record in records if record.outcome is Outcome.FAILED)
    return Ends(
        counts[Outcome.FINISHED],
        counts[Outcome.CUT],
        counts[Outcome.FAILED],
        tuple(f"{text} ({count} times)" for text, count in failures.most_common(3)),
    )
