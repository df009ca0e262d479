"""What a prefill and a decode worker have in common between their scheduler and their gateways."""

import abc
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Generic

import msgspec

from engine.admission import check_group, check_spec
from engine.assembly import Engine
from engine.errors import RejectedError
from engine.grammar_door import GrammarDoor
from engine.request import Request, ScheduledRow, StepResult
from engine.request_book import Command, Job, RequestBook
from kvtransfer.codec import MAX_TEXT_CHARS
from kvtransfer.faults import Witness, unwatched
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest
from kvtransfer.request_parts import EndReason, LifetimeEvent, RequestEnd, RequestOutput, RequestSpec
from kvtransfer.worker_facts import KvTraffic, Load


class EngineRole(abc.ABC, Generic[Job, Command]):
    """Admission, steps, cancellation, outputs and load; what to compute and how KV moves is the subclass's.

    `holds_output`: whether the KV of output tokens stays in this worker's pool. `clock` gives seconds, monotonic.
    `witness` is told of each event of each request. `door`: where grammars are compiled; without one they are refused.
    """

    def __init__(
        self,
        engine: Engine,
        book: RequestBook[Job, Command, Any],
        *,
        holds_output: bool,
        clock: Callable[[], float] = time.monotonic,
        witness: Witness = unwatched,
        door: GrammarDoor[Job] | None = None,
    ) -> None:
        self._engine = engine
        self._book = book
        self._holds_output = holds_output
        self._clock = clock
        self._witness = witness
        self._door = door
        self._refusals: list[tuple[str, RequestOutput]] = []

    def is_empty(self) -> bool:
        return len(self._book) == 0 and self._num_at_door == 0

    def check_integrity(self) -> None:
        self._book.check_integrity()

    def load(self) -> Load:
        load = self._book.load()
        num_waiting = load.num_waiting + self._num_at_door
        return msgspec.structs.replace(load, num_waiting=num_waiting, kv_traffic=self._kv_traffic())

    def cancel(self, gateway: str, message: Cancel, now: float) -> None:
        """The owner no longer wants the request; the word of another gateway doesn't count."""
        key = (message.request_id, message.attempt)
        request = self._book.find(key)
        if request is not None and request.gateway == gateway:
            self._book.cancel(key, now)
        elif self._door is not None and (gone := self._door.leave(key, gateway)) is not None:
            self._turn_away([gone], EndReason.CANCELLED)

    def cancel_all_of(self, gateway: str, now: float) -> None:
        self._book.cancel_all_of(gateway, now)
        if self._door is not None:
            self._turn_away(self._door.leave_all_of(gateway), EndReason.CANCELLED)

    def stop(self) -> None:
        """Ends the threads of this role. The engine, and with it the compiled grammars, may serve another one."""
        if self._door is not None:
            self._door.close()

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
        self._take_from_door(now)
        self._book.expire(now)
        rows = self._book.schedule(now)
        moves = self._book.take_moves()
        if moves:
            self._engine.mover.carry_out(moves)
        self._carry_out_all()  # what has been admitted is offered before its KV is computed, not a step later
        result = self._compute(rows) if rows else StepResult(())
        if moves:  # blocks may be granted to a transfer from here on
            self._engine.mover.settle()
        self._complete(rows, result, self._clock())
        return bool(rows)

    def _complete(self, rows: Sequence[ScheduledRow], result: StepResult, now: float) -> None:
        """Books a step. A request that no token is left for ends with the reason, and its row counts for nothing; a
        group that has no first token yet is under the same rules and ends as one."""
        refused = self._door.masks.take_refused() if self._door is not None else {}
        reasons = {request.leader or request: reason for request, reason in refused.items()}
        self._book.complete(*_without(reasons, rows, result), now)
        for request, reason in reasons.items():
            self._book.reject(request.key, reason, now)

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

    @property
    def _num_at_door(self) -> int:
        return 0 if self._door is None else len(self._door)

    def _let_in(self, members: Sequence[Job], now: float) -> None:
        """Queues a request that has been checked, with the further choices of its prompt; one with a grammar, once that
        is compiled."""
        request, *followers = members
        if request.sampling.grammar is None:
            self._book.add(request, now, followers)
        elif self._door is None:
            self._turn_away(members, EndReason.REJECTED, "this worker takes no grammars")
        elif self._door.is_full:
            self._turn_away(members, EndReason.OVERLOADED, "too many requests of this worker wait for their grammars")
        elif self._book.find(request.key) is None:  # else a repeated message
            for member in members:
                member.record(LifetimeEvent.RECEIVED, now)
            self._door.enter(request, followers)

    def _take_from_door(self, now: float) -> None:
        for members, fault in self._door.take_ready() if self._door is not None else ():
            if fault is None:
                self._book.add(members[0], now, members[1:])
            else:
                reason = EndReason.REJECTED if isinstance(fault, RejectedError) else EndReason.FAILED
                unheard = [member for member in members if not member.is_over]
                self._turn_away(unheard, reason, str(fault))

    def _turn_away(self, members: Sequence[Request], reason: EndReason, message: str = "") -> None:
        """The one word that requests get which never came into the book."""
        for member in members:
            self._refuse(member.gateway, member.spec, reason, message)

    def _refuse(self, gateway: str, spec: RequestSpec, reason: EndReason, message: str) -> None:
        end = RequestEnd(reason, message[:MAX_TEXT_CHARS])
        self._refusals.append((gateway, RequestOutput(spec.request_id, spec.attempt, 0, end=end)))

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
            for spec in message.specs:
                self._refuse(gateway, spec, EndReason.REJECTED, str(error))
            return False
        return True


def _without(
    refused: Container[Request], rows: Sequence[ScheduledRow], result: StepResult
) -> tuple[Sequence[ScheduledRow], StepResult]:
    """Rows and result but for those of requests, or groups, that are among `refused`."""
    kept = [index for index, row in enumerate(rows) if (row.request.leader or row.request) not in refused]
    if len(kept) == len(rows):
        return rows, result
    told = {place: result.logprobs[index] for place, index in enumerate(kept) if index in result.logprobs}
    return [rows[index] for index in kept], StepResult([result.token_ids[index] for index in kept], told)
