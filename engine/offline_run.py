"""Drives a `LocalRole` until all jobs have their result. One step of the loop:

    jobs --fill--> scheduler --step--> new tokens --> texts --> results of those that have ended

At most `ahead` requests are in the scheduler at a time, so that of millions of jobs only these are in memory.
"""

from collections.abc import Iterable, Iterator

from engine.deferred_interrupt import interrupt_deferred
from engine.errors import EngineError
from engine.local_role import LocalRole
from engine.offline_jobs import Job
from engine.offline_output import CompletionOutput, Decode, OutputText, RequestOutput
from kvtransfer.request_parts import EndReason, RequestEnd
from kvtransfer.request_parts import RequestOutput as NewTokens


class _Running:
    """A job in the scheduler, and its text so far."""

    def __init__(self, number: int, job: Job, decode: Decode) -> None:
        self.number = number
        self._job = job
        self._text = OutputText(decode, job.spec.prompt_token_ids, job.params)
        self._num_cached = 0

    @property
    def is_over(self) -> bool:
        return self._text.finish_reason is not None

    def take(self, new: NewTokens) -> None:
        self._num_cached = new.num_cached
        self._text.push(new.token_ids, None if new.end is None else _own_end(self._job, new.end))

    def result(self) -> RequestOutput:
        outputs: tuple[CompletionOutput, ...] = (self._text.result(0),)
        return RequestOutput(self._job.prompt, self._job.spec.prompt_token_ids, outputs, self._num_cached)


class OfflineRun:
    """Iterates over (number of a job, its result), as jobs end. An interrupt comes between two steps. Whoever leaves
    early has to `LocalRole.end_all`."""

    def __init__(self, role: LocalRole, jobs: Iterable[Job], ahead: int, decode: Decode) -> None:
        self._role = role
        self._jobs = enumerate(jobs)
        self._ahead = ahead
        self._decode = decode
        self._running: dict[str, _Running] = {}
        self._has_more = True

    def __iter__(self) -> Iterator[tuple[int, RequestOutput]]:
        self._fill()
        while self._running:
            with interrupt_deferred():
                self._role.step()
                ended = self._collect()
            for running in ended:
                yield running.number, running.result()
            self._fill()

    def _fill(self) -> None:
        while self._has_more and len(self._running) < self._ahead:
            self._has_more = False
            for number, job in self._jobs:
                self._running[job.spec.request_id] = _Running(number, job, self._decode)
                self._role.add(job.spec)
                self._has_more = True
                break

    def _collect(self) -> list[_Running]:
        """Takes the new tokens, and returns what has ended with them. What comes of requests that are over (a stop
        string was in their text) counts no more."""
        ended = []
        for new in self._role.take_outputs():
            running = self._running.get(new.request_id)
            if running is None:
                continue
            running.take(new)
            if running.is_over:
                ended.append(self._running.pop(new.request_id))
                if new.end is None:
                    self._role.end_early(new.request_id)
        return ended


def _own_end(job: Job, end: RequestEnd) -> EndReason:
    """STOP or LENGTH. Nothing else can happen to a job that has been checked, with nobody else here."""
    if end.reason not in (EndReason.STOP, EndReason.LENGTH):
        raise EngineError(f"request {job.spec.request_id} ended as {end.reason.value}: {end.message}")
    return end.reason
