"""Any order of outputs, cancels, failures and deaths: each request ends once, its tokens have no gap or repeat, both
workers have ended it or were told to, nothing fails without a cause, and the books are empty.

The machine plays two workers of each role. What a worker does with a request is kept in a `Part`; the true tokens of a
request are a function of its number and their index, so a token that is swapped, lost or repeated is seen.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.backend import UnavailableError
from gateway.cluster import ClusterSettings
from gateway.dispatch import DispatchSettings
from kvtransfer.errors import MessageError
from kvtransfer.messages import Cancel, DecodeRequest, EndReason, Goodbye, PrefillRequest, RequestSpec
from tests.gateway.cluster_world import Client, World

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STREAM_LIMIT = 6
FIRST_TOKEN_TIMEOUT_S = 20
FAULTS = [EndReason.FAILED, EndReason.OVERLOADED, EndReason.REJECTED, EndReason.CANCELLED]
LOSSES = ["silence", "goodbye", "malformed", "restart"]


@dataclass
class Part:
    """One worker's side of a request."""

    worker_id: str
    generation: str
    next_index: int
    knows_first: bool = False  # has said token 0
    ended: bool = False  # said so itself, or was lost
    failed: bool = False  # ended with a fault, or was lost before its end
    is_owed: bool | None = None  # a Cancel, as of the request's end; None while it runs
    num_excused: int = 0  # further Cancels that there is a reason for


@dataclass
class Asked:
    """A request as the machine knows it."""

    number: int
    client: Client
    spec: RequestSpec
    prefill: Part
    decode: Part | None
    asked_at: float
    finish: tuple[EndReason, int] | None = None  # of a worker that finished it: reason and number of tokens
    left: bool = False
    was_slow: bool = False
    parts: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [self.prefill] if self.decode is None else [self.prefill, self.decode]

    def tokens(self, start: int, stop: int) -> list[int]:
        return [(self.number * 31 + index * 7) % 100 for index in range(start, stop)]

    @property
    def decode_has_all(self) -> bool:
        """Decode runs and token 0 is known, so prefill is not needed any more."""
        return self.decode is not None and self.decode.next_index > 1 and any(part.knows_first for part in self.parts)

    def has_cause_to_fail(self, now: float) -> bool:
        came_too_early = self.decode is not None and self.decode.next_index > STREAM_LIMIT
        is_late = now - self.asked_at >= FIRST_TOKEN_TIMEOUT_S
        return self.was_slow or came_too_early or is_late or any(part.failed for part in self.parts)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asked: list[Asked] = []
        self.generations = dict.fromkeys(WORKERS, 0)
        self.live: set[str] = set()
        self.do(self._start())

    def do(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    async def _start(self) -> None:
        bounds = DispatchSettings(
            max_in_flight=4,
            stream_buffer_tokens=STREAM_LIMIT,
            request_timeout_s=50,
            first_token_timeout_s=FIRST_TOKEN_TIMEOUT_S,
            tick_s=3600,
        )
        self.world = World(ClusterSettings(), bounds)
        self.running = self.loop.create_task(self.world.dispatcher.run(self.world.control))
        for worker_id in WORKERS:
            await self._join(worker_id)

    @initialize(max_tokens=st.lists(st.sampled_from([2, 6, 12]), min_size=2, max_size=3))
    def ask_some(self, max_tokens: list[int]) -> None:
        for number in max_tokens:
            self.ask(number)

    async def _join(self, worker_id: str) -> None:
        self.generations[worker_id] += 1
        self.live.add(worker_id)
        await self.world.join(worker_id, generation=self._generation(worker_id))

    def _generation(self, worker_id: str) -> str:
        return f"g{self.generations[worker_id]}"

    def _is_over(self, asked: Asked) -> bool:
        return any(outcome.request_id == asked.spec.request_id for outcome in self.world.recorder.outcomes)

    def _pick(self, data) -> Asked:
        """Mostly a request that runs; sometimes one that is over, about which a worker or a client may not know yet."""
        running = [asked for asked in self.asked if not self._is_over(asked)]
        return data.draw(st.sampled_from(running * 3 + self.asked[-3:]))

    # --- what can happen ---

    @rule(max_tokens=st.sampled_from([1, 2, 6, 12]))
    def ask(self, max_tokens: int) -> None:
        num_sent = len(self.world.control.sent)
        client = self.do(self.world.ask(max_tokens=max_tokens))
        sent = self.world.control.sent[num_sent:]
        prefill = [(target, message) for target, message in sent if isinstance(message, PrefillRequest)]
        decode = [target for target, message in sent if isinstance(message, DecodeRequest)]
        if not prefill:
            assert client.error is not None
            assert decode == []
            return
        [(target, message)] = prefill
        assert len(decode) == (0 if max_tokens == 1 else 1)
        first = Part(target, self._generation(target), next_index=0)
        second = Part(decode[0], self._generation(decode[0]), next_index=1) if decode else None
        self.asked.append(Asked(len(self.asked), client, message.request, first, second, self.world.clock.now))

    def _say(self, asked: Asked, part: Part, start: int, stop: int, end: EndReason | None) -> None:
        """A worker speaks, whether or not anybody listens: a Cancel may be on its way."""
        assert not part.ended
        if end is EndReason.STOP or end is EndReason.LENGTH:
            asked.finish = (end, stop)
        if self._is_over(asked):
            part.num_excused += 1
        part.next_index = max(part.next_index, stop)
        part.knows_first = part.knows_first or start == 0 < stop
        part.failed = end in FAULTS and (part is asked.decode or not asked.decode_has_all)
        part.ended = end is not None
        tokens = asked.tokens(start, stop)
        self.do(self.world.say(part.worker_id, asked.spec, start, tokens, end, generation=part.generation))

    # Few rules, each with choices inside: with a rule for each event, most examples would be all trouble and no work.

    @rule(data=st.data(), roles=st.lists(st.sampled_from(["prefill", "decode", "decode"]), min_size=1, max_size=5))
    def workers_work(self, data, roles: list[str]) -> None:
        asked = self._pick(data)
        for role in roles:
            if asked.finish is not None and asked.finish[1] == 1:
                return
            if role == "prefill" and not asked.prefill.ended:
                self._work_as_prefill(asked, is_last=data.draw(st.sampled_from([False, False, False, True])))
            elif role == "decode" and asked.decode is not None and not asked.decode.ended:
                self._work_as_decode(asked, asked.decode, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)))

    def _work_as_prefill(self, asked: Asked, is_last: bool) -> None:
        """The first token, alone or with the end of the request; later the hand-over."""
        if asked.prefill.next_index == 1:
            self._say(asked, asked.prefill, 1, 1, EndReason.HANDED_OVER)
        elif asked.decode is None:
            self._say(asked, asked.prefill, 0, 1, EndReason.LENGTH)
        else:  # decode speaks only if the first token wasn't the last
            self._say(asked, asked.prefill, 0, 1, EndReason.STOP if is_last and asked.decode.next_index == 1 else None)

    def _work_as_decode(self, asked: Asked, part: Part, count: int, repeats: int) -> None:
        """The next tokens, perhaps with some that were said before; at times an early end."""
        max_tokens = asked.spec.sampling.max_tokens
        stop = min(max_tokens, part.next_index + count)
        end = EndReason.LENGTH if stop == max_tokens else EndReason.STOP if (count, repeats) == (2, 2) else None
        self._say(asked, part, max(0, part.next_index - repeats), stop, end)

    @rule(data=st.data(), what=st.sampled_from(["a worker fails", "the client leaves", "the client pauses"]))
    def a_request_has_trouble(self, data, what: str) -> None:
        asked = self._pick(data)
        if what == "a worker fails":
            part = data.draw(st.sampled_from(asked.parts))
            if not part.ended:
                self._say(asked, part, part.next_index, part.next_index, data.draw(st.sampled_from(FAULTS)))
        elif what == "the client leaves":
            asked.left = asked.left or not asked.client.task.done()
            self.do(asked.client.leave())
        else:
            asked.was_slow = True
            (asked.client.reading.clear if asked.client.reading.is_set() else asked.client.reading.set)()
            self.do(self.world.settle())

    @rule(worker_id=st.sampled_from(WORKERS), how=st.sampled_from(LOSSES))
    def a_worker_is_lost_or_comes(self, worker_id: str, how: str) -> None:
        if worker_id not in self.live:
            self.do(self._join(worker_id))
            return
        self.live.discard(worker_id)
        for asked in self.asked:
            for part in (part for part in asked.parts if part.worker_id == worker_id and not part.ended):
                part.ended = True
                part.failed = part is asked.decode or not asked.decode_has_all
                part.num_excused += how == "silence"  # a deadline may come before the silence is noticed
        self._lose(worker_id, how)

    def _lose(self, worker_id: str, how: str) -> None:
        if how == "silence":
            self._pass_time(2.5)
        elif how == "restart":
            self.do(self._join(worker_id))
        else:
            message = MessageError("bad") if how == "malformed" else Goodbye(self._generation(worker_id), "bye")
            self.do(self.world.hear(worker_id, message))

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
        assert self.world.dispatcher.in_flight == sum(not self._is_over(asked) for asked in self.asked)

    @invariant()
    def each_request_ends_once_and_its_tokens_are_true(self) -> None:
        for asked in self.asked:
            client = asked.client
            assert client.tokens == asked.tokens(0, len(client.tokens))
            ends = [item for item in self.world.recorder.outcomes if item.request_id == asked.spec.request_id]
            assert len(ends) <= 1
            assert client.finish is None or client.error is None
            if client.finish is not None:
                assert (client.finish, len(client.tokens)) == asked.finish
            if client.reading.is_set() and not asked.left:
                assert client.task.done() == bool(ends) == bool(client.finish or client.error)

    @invariant()
    def whoever_still_has_an_ended_request_is_told_once(self) -> None:
        for asked in self.asked:
            for part in asked.parts:
                cancels = self.world.control.to(part.worker_id, Cancel).count(Cancel(asked.spec.request_id, 0))
                if not self._is_over(asked):
                    assert cancels == 0
                    continue
                if part.is_owed is None:
                    part.is_owed = not part.ended
                assert part.is_owed <= cancels <= part.is_owed + part.num_excused

    @invariant()
    def it_fails_exactly_if_there_is_a_cause(self) -> None:
        for asked in self.asked:
            if any(part.failed for part in asked.parts):
                assert self._is_over(asked)
            if asked.client.error is not None:
                assert asked.has_cause_to_fail(self.world.clock.now), asked.client.error

    def teardown(self) -> None:
        for asked in self.asked:
            asked.client.reading.set()
        self._pass_time(60)
        assert all(asked.client.task.done() and self._is_over(asked) for asked in self.asked)
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
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase


def test_the_machine_reaches_the_good_end():
    """A control of the machine itself: its moves do carry a request to its finish."""
    machine = AnyOrder()
    machine.ask(max_tokens=2)
    [asked] = machine.asked
    machine._say(asked, asked.prefill, 0, 1, None)
    machine._say(asked, asked.decode, 1, 2, EndReason.LENGTH)
    machine.each_request_ends_once_and_its_tokens_are_true()
    assert asked.client.finish is EndReason.LENGTH
    for worker_id in ("decode-0", "decode-1"):
        machine.a_worker_is_lost_or_comes(worker_id, "goodbye")
    machine.ask(max_tokens=2)
    assert len(machine.asked) == 1
    assert isinstance(machine.do(machine.world.ask()).error, UnavailableError)
    machine.teardown()
