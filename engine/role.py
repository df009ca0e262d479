"""What a prefill and a decode worker have in common between their scheduler and their gateways."""

import abc
import time
from collections.abc import Callable, Sequence
from typing import Generic

import msgspec

from engine.admission import check_group, check_spec
from engine.assembly import Engine
from engine.errors import RejectedError
from engine.request import ScheduledRow, StepResult
from engine.request_book import Command, Job, RequestBook
from kvtransfer.faults import Witness, unwatched
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    EndReason,
    KvTraffic,
    Load,
    PrefillRequest,
    RequestEnd,
    RequestOutput,
)


class EngineRole(abc.ABC, Generic[Job, Command]):
    """Admission, steps, cancellation, outputs and load; what to compute and how KV moves is the subclass's.

    `holds_output`: whether the KV of output tokens stays in this worker's pool. `clock` gives seconds, monotonic.
    `witness` is told of each event of each request.
    """

    def __init__(
        self,
        engine: Engine,
        book: RequestBook[Job, Command],
        *,
        holds_output: bool,
        clock: Callable[[], float] = time.monotonic,
        witness: Witness = unwatched,
    ) -> None:
        self._engine = engine
        self._book = book
        self._holds_output = holds_output
        self._clock = clock
        self._witness = witness
        self._refusals: list[tuple[str, RequestOutput]] = []

    def is_empty(self) -> bool:
        return len(self._book) == 0

    def check_integrity(self) -> None:
        self._book.check_integrity()

    def load(self) -> Load:
        return msgspec.structs.replace(self._book.load(), kv_traffic=self._kv_traffic())

    def cancel(self, gateway: str, message: Cancel, now: float) -> None:
        """The owner no longer wants the request; the word of another gateway doesn't count."""
        key = (message.request_id, message.attempt)
        request = self._book.find(key)
        if request is not None and request.gateway == gateway:
            self._book.cancel(key, now)

    def cancel_all_of(self, gateway: str, now: float) -> None:
        self._book.cancel_all_of(gateway, now)

    def reset_prefix_cache(self) -> None:
        self._engine.pool.forget_names()

    def flush(self) -> Sequence[tuple[str, RequestOutput]]:
        """Carries out what the scheduler decided and returns what the gateways have to know, in order."""
        self._carry_out_all()
        refusals, self._refusals = self._refusals, []
        return refusals + [(item.gateway, item.output) for item in self._book.take_outputs()]

    def step(self) -> bool:
        """One engine step with all that follows from it; False if there was nothing to compute."""
        now = self._clock()
        self._book.expire(now)
        rows = self._book.schedule(now)
        moves = self._book.take_moves()
        if moves:
            self._engine.mover.carry_out(moves)
        self._carry_out_all()  # what has been admitted is offered before its KV is computed, not a step later
        result = self._compute(rows) if rows else StepResult(())
        if moves:  # blocks may be granted to a transfer from here on
            self._engine.mover.settle()
        self._book.complete(rows, result, self._clock())
        return bool(rows)

    def _carry_out_all(self) -> None:
        for command in self._book.take_commands():
            self._carry_out(command)

    @abc.abstractmethod
    def _kv_traffic(self) -> KvTraffic:
        """What has become of KV that moved, since the start."""

    @abc.abstractmethod
    def _compute(self, rows: Sequence[ScheduledRow]) -> StepResult:
        """Runs the model over `rows`."""

    @abc.abstractmethod
    def _carry_out(self, command: Command) -> None:
        """Passes a decision of the scheduler on to the thread that moves KV."""

    def _can_serve(self, gateway: str, message: PrefillRequest | DecodeRequest) -> bool:
        """Whether this worker can ever serve what is asked; if not, its gateway is told why."""
        try:
            check_group(message.specs, self._book.max_members)
            check_spec(
                message.request,
                vocab_size=self._engine.fingerprint.vocab_size,
                max_model_len=self._engine.max_model_len,
                pool_tokens=self._engine.kv_cache.num_tokens,
                holds_output=self._holds_output,
            )
        except RejectedError as error:
            end = RequestEnd(EndReason.REJECTED, str(error))
            refused = [RequestOutput(spec.request_id, spec.attempt, 0, end=end) for spec in message.specs]
            self._refusals += [(gateway, output) for output in refused]
            return False
        return True
