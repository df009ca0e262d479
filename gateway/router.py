"""Which workers get a request: a pure choice from what is known now.

Heartbeats lag by up to half a second, in which many requests can arrive; so the gateway's own book of what it has
outstanding counts beside the load that workers report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.backend import UnavailableError
from gateway.worker import Worker


class InFlightBook:
    """Tokens that this gateway has outstanding, by worker and request."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, int]] = {}

    def add(self, worker_id: str, request_id: str, num_tokens: int) -> None:
        self._entries.setdefault(worker_id, {})[request_id] = num_tokens

    def discard(self, worker_id: str, request_id: str) -> None:
        """Forgets the entry, if there is one."""
        entries = self._entries.get(worker_id, {})
        entries.pop(request_id, None)
        if not entries:
            self._entries.pop(worker_id, None)

    def num_tokens(self, worker_id: str) -> int:
        return sum(self._entries.get(worker_id, {}).values())

    def num_requests(self, worker_id: str) -> int:
        return len(self._entries.get(worker_id, {}))

    @property
    def entries(self) -> frozenset[tuple[str, str]]:
        """All (worker id, request id) in the book."""
        return frozenset(
            (worker_id, request_id) for worker_id in self._entries for request_id in self._entries[worker_id]
        )


@dataclass(frozen=True)
class Route:
    """The workers of one request."""

    prefill: Worker
    decode: Worker


def choose(prefill: Sequence[Worker], decode: Sequence[Worker], book: InFlightBook) -> Route:
    """The prefill worker with the fewest prompt tokens outstanding, and the decode worker under the least pressure.

    Takes live workers that make progress. Each has room for its `max_model_len` in an empty pool, or it would not have
    started, so whatever the smallest of these lengths admits fits all of them. Ties go to the smaller id, so that the
    choice is the same each time. Raises UnavailableError if there is no worker of a role.
    """
    for role, workers in (("prefill", prefill), ("decode", decode)):
        if not workers:
            raise UnavailableError(f"no {role} worker can take requests")
    return Route(
        prefill=min(prefill, key=lambda worker: _prefill_order(worker, book)),
        decode=min(decode, key=lambda worker: _decode_order(worker, book)),
    )


def _prefill_order(worker: Worker, book: InFlightBook) -> tuple[int, int, str]:
    reported = worker.load.num_running + worker.load.num_waiting
    return (book.num_tokens(worker.worker_id), reported, worker.worker_id)


def _decode_order(worker: Worker, book: InFlightBook) -> tuple[float, int, str]:
    """Pressure is the scarcer of KV room and batch rows, each as the larger of what is reported and what is booked."""
    num_booked = book.num_requests(worker.worker_id)
    num_requests = max(worker.load.num_running + worker.load.num_waiting, num_booked)
    kv = max(worker.load.kv_usage, book.num_tokens(worker.worker_id) / worker.limits.kv_tokens)
    rows = num_requests / worker.limits.max_num_seqs
    return (max(kv, rows), num_booked, worker.worker_id)
