"""Starts of workers that can't come back: without it two processes with one id would replace each other for ever, and a
worker that drains would be taken in again."""

from gateway.worker import WorkerRef


class RetiredStarts:
    """The last `MAX_RETIRED` of them, and why each is over."""

    MAX_RETIRED = 1024

    def __init__(self) -> None:
        self._reasons: dict[WorkerRef, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._reasons)

    def __contains__(self, ref: WorkerRef) -> bool:
        return ref in self._reasons

    def add(self, ref: WorkerRef, reason: str) -> None:
        self._reasons[ref] = reason
        if len(self._reasons) > self.MAX_RETIRED:
            del self._reasons[next(iter(self._reasons))]

    def reason(self, ref: WorkerRef) -> str | None:
        """Why this start is over; None if it may come (back)."""
        return self._reasons.get(ref)
