"""What a client saw of one streamed completion. Times are seconds on one monotonic clock. No socket or clock here.

    due       sent                 chunk 0    chunk 1   ...   chunk n-1   ended
     |-late_by-|-------- TTFT -------|--- gap ---|--- gaps: n-1 in all -----|

Only chunks with content count: a role or a usage report is no token.
"""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How a stream ended."""

    FINISHED = "finished"  # the server said that it is done
    CUT = "cut"  # the client hung up because its time was over
    FAILED = "failed"  # refused, broken off, or an error within the stream


@dataclass(frozen=True)
class StreamRecord:
    """`prompt_tokens` and `completion_tokens` are the server's own count, if it sent one."""

    sent_at: float
    ended_at: float
    outcome: Outcome
    chunk_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    late_by: float = 0.0  # sent later than the client's own schedule said
    failure: str = ""

    @property
    def ttft(self) -> float | None:
        return self.chunk_times[0] - self.sent_at if self.chunk_times else None

    @property
    def tokens_per_chunk(self) -> float | None:
        if self.outcome is not Outcome.FINISHED or self.completion_tokens is None or not self.chunk_times:
            return None
        return self.completion_tokens / len(self.chunk_times)

    def gaps(self, start: float, stop: float) -> list[tuple[float, float]]:
        """(when it ended, its length) of each gap between chunks that ends within [start, stop]."""
        pairs = zip(self.chunk_times, self.chunk_times[1:], strict=False)
        return [(later, later - earlier) for earlier, later in pairs if start <= later <= stop]

    def first_gap(self, start: float, stop: float) -> float | None:
        """Token 1 to token 2: in a disaggregated server the hand-over lies in it."""
        if len(self.chunk_times) < 2 or not start <= self.chunk_times[1] <= stop:
            return None
        return self.chunk_times[1] - self.chunk_times[0]

    @property
    def open_gap(self) -> float:
        """Silence before the client hung up, which no list of gaps shows; 0 for a stream that ended by itself."""
        if self.outcome is not Outcome.CUT:
            return 0.0
        return self.ended_at - (self.chunk_times[-1] if self.chunk_times else self.sent_at)
