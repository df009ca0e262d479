"""Which workers get a request: a pure choice from what is known now.

Heartbeats lag by up to half a second, in which many requests can arrive; so the gateway's own book of what it has
outstanding counts beside the load that workers report.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from gateway.backend import UnavailableError
from gateway.worker import Worker, WorkerRef

SIMILAR_PRESSURE: Final = 0.1
"""Workers whose pressure is within so much of the least are equally good, but for what they hold of a prompt."""


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
    """The workers of one attempt. `prefill` is None if decode computes the prompt, `decode` is None if prefill's token
    is the last."""

    prefill: Worker | None
    decode: Worker | None

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in (self.prefill, self.decode) if worker is not None)

    @property
    def max_num_seqs(self) -> int:
        """Requests that all of its workers can run at once."""
        return min(worker.limits.max_num_seqs for worker in self.workers)

    def num_suspects(self, suspects: AbstractSet[WorkerRef]) -> int:
        return sum(worker.ref in suspects for worker in self.workers)

    def avoids(self, suspects: AbstractSet[WorkerRef]) -> bool:
        """Whether none of them is a suspect."""
        return self.num_suspects(suspects) == 0


def nothing_held(worker: Worker) -> int:
    """What a worker holds of a prompt that nobody has sent before."""
    return 0


def choose(
    prefill: Sequence[Worker] | None,
    decode: Sequence[Worker] | None,
    book: InFlightBook,
    suspects: AbstractSet[WorkerRef] = frozenset(),
    num_held: Callable[[Worker], int] = nothing_held,
) -> Route:
    """The prefill worker with the fewest prompt tokens outstanding, and the decode worker under the least pressure, or
    of those about as good the one that holds most of the prompt (`num_held`, tokens). `prefill` or `decode` is None if
    none of the role is needed; `suspects` only where there is nobody else.

    Takes live workers that make progress and have room for the request in an empty pool. Ties go to the smaller id, so
    that the choice is the same each time. Raises UnavailableError if there is no worker of a role.
    """
    return Route(
        prefill=None if prefill is None else _choose_prefill(_take(prefill, "prefill", suspects), book, num_held),
        decode=None if decode is None else _choose_decode(_take(decode, "decode", suspects), book, num_held),
    )


def _choose_prefill(workers: Sequence[Worker], book: InFlightBook, num_held: Callable[[Worker], int]) -> Worker:
    """Of those about as good as the one with the fewest tokens outstanding, that which is done first: what it holds of
    the prompt need not be computed, and a queue that is longer than that is not worth waiting in."""
    idlest = min(workers, key=lambda worker: _prefill_order(worker, book, 0))
    enough = _pressure(idlest, book) + SIMILAR_PRESSURE
    similar = [worker for worker in workers if _pressure(worker, book) <= enough]
    return min(similar, key=lambda worker: _prefill_order(worker, book, num_held(worker)))


def _choose_decode(workers: Sequence[Worker], book: InFlightBook, num_held: Callable[[Worker], int]) -> Worker:
    ordered = sorted(workers, key=lambda worker: _decode_order(worker, book))
    enough = _pressure(ordered[0], book) + SIMILAR_PRESSURE
    return max((worker for worker in ordered if _pressure(worker, book) <= enough), key=num_held)  # the first, if equal


def _take(workers: Sequence[Worker], role: str, suspects: AbstractSet[WorkerRef]) -> Sequence[Worker]:
    """The workers to choose from, never none."""
    if not workers:
        raise UnavailableError(f"no {role} worker can take requests")
    return [worker for worker in workers if worker.ref not in suspects] or workers


def _prefill_order(worker: Worker, book: InFlightBook, num_held: int) -> tuple[int, int, str]:
    """`num_held` for what is left of the prompt, whose length is the same everywhere."""
    reported = worker.load.num_running + worker.load.num_waiting
    return (book.num_tokens(worker.worker_id) - num_held, reported, worker.worker_id)


def _decode_order(worker: Worker, book: InFlightBook) -> tuple[float, int, str]:
    return (_pressure(worker, book), book.num_requests(worker.worker_id), worker.worker_id)


def _pressure(worker: Worker, book: InFlightBook) -> float:
    """The scarcer of KV room and batch rows, each as the larger of what is reported and what is booked."""
    num_requests = max(worker.load.num_running + worker.load.num_waiting, book.num_requests(worker.worker_id))
    kv = max(worker.load.kv_usage, book.num_tokens(worker.worker_id) / worker.limits.kv_tokens)
    rows = num_requests / worker.limits.max_num_seqs
    return max(kv, rows)
