"""An engine and its scheduler in one process: takes checked requests, computes steps, hands out what is new."""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from engine.admission import check_spec
from engine.assembly import Engine
from engine.growing_book import GrowingJob
from engine.local_scheduler import LocalScheduler
from engine.request import ScheduledRow, StepResult
from engine.role import EngineRole
from kvtransfer.request_parts import RequestOutput, RequestSpec
from kvtransfer.worker_facts import KvTraffic

OWNER = "local"
"""Stands where a worker names the gateway that a request is of."""


class LocalRole(EngineRole[GrowingJob, NoReturn]):
    """What `engine.offline` drives; not safe to use from several threads."""

    def __init__(self, engine: Engine, scheduler: LocalScheduler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(engine, scheduler, holds_output=True, clock=clock)
        self._scheduler = scheduler

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._scheduler)

    def check(self, spec: RequestSpec) -> None:
        """Raises RejectedError if `spec` can never be served here."""
        check_spec(
            spec,
            vocab_size=self._engine.fingerprint.vocab_size,
            max_model_len=self._engine.max_model_len,
            pool_tokens=self._engine.kv_cache.num_tokens,
        )

    def add(self, spec: RequestSpec) -> None:
        """Queues a request that has passed `check`."""
        self._scheduler.add(GrowingJob(spec, OWNER), self._clock())

    def end_early(self, request_id: str) -> None:
        """The rest of the request's output is not wanted; nothing if it has ended."""
        self._scheduler.cancel((request_id, 0), self._clock())

    def end_all(self) -> None:
        """Drops all requests and what they had to say."""
        self.cancel_all_of(OWNER, self._clock())
        self.flush()

    def take_outputs(self) -> list[RequestOutput]:
        """What is new since the last call, in order."""
        return [output for _, output in self.flush()]

    def _kv_traffic(self) -> KvTraffic:
        return KvTraffic()

    def _compute(self, rows: Sequence[ScheduledRow]) -> StepResult:
        return self._engine.runner.step(rows)

    def _carry_out(self, command: NoReturn) -> None:
        raise AssertionError(f"a command to nobody: {command}")
