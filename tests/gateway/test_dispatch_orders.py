"""Any order of outputs, cancels, failures and deaths: each request ends once, its tokens have no gap or repeat, both
workers have ended it or were told to, and the books are empty.

The machine plays two workers of each role. What a worker does with a request is kept in a `Part`; the true tokens of a
request are a function of its index, so a token that is swapped, lost or repeated is seen.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.backend import UnavailableError
from gateway.cluster import ClusterSettings
from gateway.dispatch import DispatchSettings
from kvtransfer.errors import MessageError
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    EndReason,
    Goodbye,
    PrefillRequest,
    RequestSpec,
)
from tests.gateway.cluster_world import Client, World

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STREAM_LIMIT = 6
HOW_LOST = ["silence", "goodbye", "malformed", "restart"]
FAULTS = [EndReason.FAILED, EndReason.OVERLOADED, EndReason.REJECTED, EndReason.CANCELLED]


@dataclass
class Part:
    """One worker's side of a request: what it has said, and whether it still has it."""

    worker_id: str
    generation: str
    next_index: int
    ended: bool = False  # said so itself, or was lost
    failed: bool = False  # said so, or was lost before it could say anything else


@dataclass
class Asked:
    """A request as the machine knows it."""

    number: int
    client: Client
    spec: RequestSpec
    prefill: Part
    decode: Part | None
    finish: tuple[EndReason, int] | None = None  # of a worker that finished it: reason and number of tokens
    left: bool = False
    parts: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [self.prefill] if self.decode is None else [self.prefill, self.decode]

    def token(self, index: int) -> int:
        return (self.number * 31 + index * 7) % 100

    def tokens(self, start: int, stop: int) -> list[int]:
        return [self.token(index) for index in range(start, stop)]


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asked: list[Asked] = []
        self.generations = dict.fromkeys(WORKERS, 0)
        self.live: set[str] = set()

    def do(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    @initialize()
    def start(self) -> None:
        self.do(self._start())

    async def _start(self) -> None:
        limits = DispatchSettings(
            max_in_flight=4,
            stream_buffer_tokens=STREAM_LIMIT,
            request_timeout_s=50,
            first_token_timeout_s=20,
            tick_s=3600,
        )
        self.world = World(ClusterSettings(), limits)
        self.running = self.loop.create_task(self.world.dispatcher.run(self.world.control))
        for worker_id in WORKERS:
            await self._join(worker_id)

    async def _join(self, worker_id: str) -> None:
        self.generations[worker_id] += 1
        self.live.add(worker_id)
        await self.world.join(worker_id, generation=self._generation(worker_id))

    def _generation(self, worker_id: str) -> str:
        return f"g{self.generations[worker_id]}"

    # --- what can happen ---

    @rule(max_tokens=st.sampled_from([1, 2, 8, 8]))
    def ask(self, max_tokens: int) -> None:
        sent_before = len(self.world.control.sent)
        client = self.do(self.world.ask(max_tokens=max_tokens))
        sent = self.world.control.sent[sent_before:]
        prefill = [(target, message) for target, message in sent if isinstance(message, PrefillRequest)]
        decode = [target for target, message in sent if isinstance(message, DecodeRequest)]
        if not prefill:
            assert client.error is not None
            return
        [(target, message)] = prefill
        assert len(decode) == (0 if max_tokens == 1 else 1)
        parts = [Part(worker_id, self._generation(worker_id), 0) for worker_id in [target, *decode]]
        if len(parts) > 1:
            parts[1].next_index = 1
        self.asked.append(Asked(len(self.asked), client, message.request, parts[0], parts[1] if decode else None))

    def _say(self, asked: Asked, part: Part, start: int, stop: int, end: EndReason | None) -> None:
        """A worker speaks, whether or not anybody still listens: its cancel may be on the way."""
        if part.ended or part.worker_id not in self.live or part.generation != self._generation(part.worker_id):
            return
        part.next_index = max(part.next_index, stop)
        if end is not None:
            part.ended, part.failed = True, end in FAULTS
        tokens = asked.tokens(start, stop)
        self.do(self.world.say(part.worker_id, asked.spec, start, tokens, end, generation=part.generation))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), stops=st.booleans())
    def prefill_speaks(self, data, stops: bool) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        is_last = stops or asked.decode is None
        if asked.prefill.next_index or (is_last and asked.decode is not None and asked.decode.next_index > 1):
            return  # decode would not run a request that is over
        end = None if not is_last else EndReason.STOP if stops else EndReason.LENGTH
        if end is not None and not asked.prefill.ended:
            asked.finish = (end, 1)
        self._say(asked, asked.prefill, 0, 1, end)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def prefill_hands_over(self, data) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        if asked.decode is not None and asked.prefill.next_index == 1:
            self._say(asked, asked.prefill, 1, 1, EndReason.HANDED_OVER)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), count=st.integers(1, 3), repeats=st.integers(0, 2), stops=st.booleans())
    def decode_speaks(self, data, count: int, repeats: int, stops: bool) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        if asked.decode is None or asked.decode.ended or (asked.finish is not None and asked.finish[1] == 1):
            return
        max_tokens = asked.spec.sampling.max_tokens
        stop = min(max_tokens, asked.decode.next_index + count)
        end = EndReason.LENGTH if stop == max_tokens else EndReason.STOP if stops else None
        if end is not None:
            asked.finish = (end, stop)
        self._say(asked, asked.decode, max(0, asked.decode.next_index - repeats), stop, end)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), reason=st.sampled_from(FAULTS))
    def a_worker_fails(self, data, reason: EndReason) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        part = data.draw(st.sampled_from(asked.parts))
        self._say(asked, part, part.next_index, part.next_index, reason)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def a_client_leaves(self, data) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        asked.left = asked.left or not asked.client.task.done()
        self.do(asked.client.leave())

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def a_client_stops_or_goes_on_reading(self, data) -> None:
        reading = data.draw(st.sampled_from(self.asked)).client.reading
        (reading.clear if reading.is_set() else reading.set)()
        self.do(self.world.settle())

    @rule(worker_id=st.sampled_from(WORKERS), how=st.sampled_from(HOW_LOST), is_rare=st.integers(0, 3))
    def a_worker_is_lost(self, worker_id: str, how: str, is_rare: int = 0) -> None:
        if worker_id not in self.live or is_rare:
            return
        self.live.discard(worker_id)
        if how == "silence":
            self._pass_time(2.5)
        elif how == "restart":
            self.do(self._join(worker_id))
        else:
            message = MessageError("bad") if how == "malformed" else Goodbye(self._generation(worker_id), "bye")
            self.do(self.world.hear(worker_id, message))
        for part in (part for asked in self.asked for part in asked.parts):
            if part.worker_id == worker_id and (how != "restart" or part.generation != self._generation(worker_id)):
                part.failed = part.failed or not part.ended
                part.ended = True

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_worker_comes(self, worker_id: str) -> None:
        if worker_id not in self.live:
            self.do(self._join(worker_id))

    @rule(seconds=st.sampled_from([0.25, 1.0, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self._pass_time(seconds)

    def _pass_time(self, seconds: float) -> None:
        alive = {worker_id: self._generation(worker_id) for worker_id in self.live}
        self.do(self.world.pass_time(seconds, alive))

    # --- what must hold ---

    @invariant()
    def the_books_agree(self) -> None:
        self.world.dispatcher.check_integrity()
        assert not self.running.done()
        assert {worker.worker_id for worker in self.world.dispatcher.workers} == self.live
        open_requests = [asked for asked in self.asked if not self._is_over(asked)]
        assert self.world.dispatcher.in_flight == len(open_requests)

    def _is_over(self, asked: Asked) -> bool:
        return any(outcome.request_id == asked.spec.request_id for outcome in self.world.recorder.outcomes)

    @invariant()
    def each_request_ends_once_and_its_tokens_are_true(self) -> None:
        for asked in self.asked:
            client = asked.client
            assert client.tokens == asked.tokens(0, len(client.tokens))
            assert not (client.finish and client.error)
            outcomes = [item for item in self.world.recorder.outcomes if item.request_id == asked.spec.request_id]
            assert len(outcomes) <= 1
            if client.finish is not None:
                assert (client.finish, len(client.tokens)) == asked.finish
            if client.task.done() and not asked.left:
                assert client.finish is not None or client.error is not None
            if client.reading.is_set():
                assert client.task.done() == bool(outcomes)

    @invariant()
    def whoever_has_an_ended_request_was_told(self) -> None:
        for asked in self.asked:
            for part in asked.parts:
                cancels = self.world.control.to(part.worker_id, Cancel).count(Cancel(asked.spec.request_id, 0))
                if self._is_over(asked):
                    assert part.ended or cancels
                else:
                    assert cancels == 0

    @invariant()
    def what_is_needed_and_lost_fails_at_once(self) -> None:
        for asked in self.asked:
            decode_has_all = asked.decode is not None and asked.prefill.next_index == 1 and asked.decode.next_index > 1
            if asked.prefill.failed and not decode_has_all:
                assert self._is_over(asked)
            if asked.decode is not None and asked.decode.ended and asked.finish is None:
                assert self._is_over(asked)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for asked in self.asked:
            asked.client.reading.set()
        self._pass_time(60)
        for asked in self.asked:
            assert asked.client.task.done()
            assert self._is_over(asked)
        self.world.assert_empty()
        assert self.world.dispatcher._flights.book.entries == frozenset()
        self.do(self._stop())
        self.loop.close()

    async def _stop(self) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running
        await self.loop.shutdown_asyncgens()


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase


def test_the_machine_reaches_the_good_end():
    """The negative control of the machine itself: its rules do carry a request to a finish."""
    machine = AnyOrder()
    machine.start()
    machine.ask(max_tokens=2)
    asked = machine.asked[0]
    machine._say(asked, asked.prefill, 0, 1, None)
    asked.finish = (EndReason.LENGTH, 2)
    machine._say(asked, asked.decode, 1, 2, EndReason.LENGTH)
    machine.the_books_agree()
    machine.each_request_ends_once_and_its_tokens_are_true()
    assert asked.client.finish is EndReason.LENGTH
    machine.a_worker_is_lost("decode-0", "goodbye")
    machine.a_worker_is_lost("decode-1", "goodbye")
    machine.ask(max_tokens=2)
    assert len(machine.asked) == 1
    assert isinstance(machine.do(machine.world.ask()).error, UnavailableError)
    machine.teardown()
