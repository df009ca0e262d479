"""The figures of a mixed load as tables. Text only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from experiments.markdown_table import markdown_table
from experiments.mixed_summary import Ends, LongSummary, StreamSummary
from experiments.percentiles import Spread, is_steady

_UNKNOWN: Final = "-"

Side = TypeVar("Side", StreamSummary, LongSummary)


@dataclass(frozen=True)
class MixedResult:
    """A whole run: streams alone and beside long prompts, long prompts alone and beside streams."""

    alone: StreamSummary
    mixed: StreamSummary
    idle: LongSummary
    loaded: LongSummary


def stream_table(result: MixedResult) -> str:
    alone, mixed = result.alone, result.mixed
    rows = [
        *_spread_rows("ITL", alone.itl, mixed.itl, ("p50", "p90", "p99", "max")),
        *_spread_rows("token 1 to 2", alone.first_gap, mixed.first_gap, ("p50", "p99")),
        *_spread_rows("TTFT", alone.ttft, mixed.ttft, ("p50", "p99")),
        _row("tokens a second", alone.tokens_per_second, mixed.tokens_per_second),
        _row("tokens a chunk, mean", alone.tokens_per_chunk, mixed.tokens_per_chunk, digits=2),
        _row("tokens a chunk, most", alone.max_tokens_per_chunk, mixed.max_tokens_per_chunk, digits=2),
        _row("silence before the cut, longest ms", alone.longest_open_gap_ms, mixed.longest_open_gap_ms),
        *_spread_rows("client's timer late by", alone.loop_lag, mixed.loop_lag, ("p99", "max")),
        _texts("over the window", alone, mixed, lambda side: _steadiness(side.drift)),
        _texts("prompt tokens", alone, mixed, lambda side: _lengths(side.prompt_tokens)),
        _texts("finished / cut / failed", alone, mixed, lambda side: _ends(side.ends)),
    ]
    return markdown_table(("streams", "alone", "with long prompts", "ratio"), rows)


def long_table(result: MixedResult) -> str:
    idle, loaded = result.idle, result.loaded
    rows = [
        *_spread_rows("TTFT", idle.ttft, loaded.ttft, ("p50", "p90", "max")),
        *_spread_rows("sent late by", idle.late, loaded.late, ("max",)),
        _texts("prompts sent a second / wanted", idle, loaded, _rate),
        _texts("prompt tokens", idle, loaded, lambda side: _lengths(side.prompt_tokens)),
        _texts("finished / cut / failed", idle, loaded, lambda side: _ends(side.ends)),
    ]
    return markdown_table(("long prompts", "idle system", "under load", "ratio"), rows)


def failure_lines(result: MixedResult) -> list[str]:
    """What went wrong, a line a kind; empty if nothing did."""
    ends = (result.alone.ends, result.mixed.ends, result.idle.ends, result.loaded.ends)
    return [f"FAILED: {text}" for end in ends for text in end.failures]


def _spread_rows(
    name: str, before: Spread | None, after: Spread | None, points: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    return [_row(f"{name} {point} ms", _point(before, point), _point(after, point)) for point in points]


def _point(spread: Spread | None, point: str) -> float | None:
    return None if spread is None else float(getattr(spread, f"{point}_ms"))


def _row(name: str, before: float | None, after: float | None, digits: int = 1) -> tuple[str, str, str, str]:
    ratio = f"{after / before:.2f}" if before and after is not None else _UNKNOWN
    return name, _number(before, digits), _number(after, digits), ratio


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


def _texts(name: str, before: Side, after: Side, text: Callable[[Side], str]) -> tuple[str, str, str, str]:
    return name, text(before), text(after), ""


def _steadiness(drift: float | None) -> str:
    if drift is None:
        return "too few tokens to tell"
    return f"{'steady' if is_steady(drift) else 'not steady'} ({drift:.2f})"


def _rate(side: LongSummary) -> str:
    wanted = "one by one" if side.wanted_per_second is None else f"{side.wanted_per_second:.3f}"
    return f"{side.sent_per_second:.3f} / {wanted}"


def _lengths(lengths: Sequence[int]) -> str:
    """All of them if the server counts one way, otherwise from the least to the most."""
    if not lengths:
        return "not reported"
    return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def _ends(ends: Ends) -> str:
    return f"{ends.finished} / {ends.cut} / {ends.failed}"
