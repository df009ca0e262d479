"""Any order of outputs, cancels, failures and deaths: each request ends once, its tokens have no gap or repeat, both
workers have ended it or were told to, nothing fails without a cause, and the books are empty.

A walk plays two workers of each role, and clients; its seed replays it. (Drawn at random and not by Hypothesis: that
repeats itself too much to reach the rarer orders in the time there is.) What a worker does with a request is kept in a
`Part`; the true tokens of a request are a function of its number and their index, so a token that is swapped, lost or
repeated is seen.
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from gateway.backend import InvalidRequestError, OverloadedError, RequestFailedError
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
    was_too_early: bool = False  # decode has said more than is kept while token 0 isn't known
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
        is_late = now - self.asked_at >= FIRST_TOKEN_TIMEOUT_S
        return self.was_slow or self.was_too_early or is_late or any(part.failed for part in self.parts)


class Walk:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
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

    async def _join(self, worker_id: str) -> None:
        self.generations[worker_id] += 1
        self.live.add(worker_id)
        await self.world.join(worker_id, generation=self._generation(worker_id))

    def _generation(self, worker_id: str) -> str:
        return f"g{self.generations[worker_id]}"

    def _is_over(self, asked: Asked) -> bool:
        return any(outcome.request_id == asked.spec.request_id for outcome in self.world.recorder.outcomes)

    def _pick(self) -> Asked:
        """Mostly a request that runs; sometimes one that is over, about which a worker or a client may not know yet."""
        running = [asked for asked in self.asked if not self._is_over(asked)]
        return self.random.choice(running * 3 + self.asked[-3:])

    def step(self) -> None:
        """One event, chosen so that most requests come some way before trouble does."""
        moves = {self.ask: 3, self.workers_work: 12, self.a_request_has_trouble: 2, self.a_worker_goes_or_comes: 1}
        moves[self.time_passes] = 1
        if self.asked:
            self.random.choices(list(moves), list(moves.values()))[0]()
        else:
            self.ask()
        self.check()

    # --- what can happen ---

    def ask(self, max_tokens: int | None = None) -> None:
        max_tokens = max_tokens or self.random.choice([1, 2, 6, 12])
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
        if part.next_index > STREAM_LIMIT and not any(part.knows_first for part in asked.parts):
            asked.was_too_early = True
        part.failed = end in FAULTS and (part is asked.decode or not asked.decode_has_all)
        part.ended = end is not None
        tokens = asked.tokens(start, stop)
        self.do(self.world.say(part.worker_id, asked.spec, start, tokens, end, generation=part.generation))

    def workers_work(self) -> None:
        asked = self._pick()
        if asked.finish is not None and asked.finish[1] == 1:
            return
        if self.random.random() < 0.4 and not asked.prefill.ended:
            self._work_as_prefill(asked, is_last=self.random.random() < 0.1)
        elif asked.decode is not None and not asked.decode.ended:
            self._work_as_decode(asked, asked.decode, self.random.randint(1, 3), self.random.randint(0, 2))

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

    def a_request_has_trouble(self) -> None:
        self.random.choice([self._a_worker_fails, self._the_client_leaves, self._the_client_pauses])(self._pick())

    def _a_worker_fails(self, asked: Asked) -> None:
        part = self.random.choice(asked.parts)
        if not part.ended:
            self._say(asked, part, part.next_index, part.next_index, self.random.choice(FAULTS))

    def _the_client_leaves(self, asked: Asked) -> None:
        asked.left = True
        self.do(asked.client.leave())

    def _the_client_pauses(self, asked: Asked) -> None:
        """Or goes on reading."""
        asked.was_slow = True
        reading = asked.client.reading
        (reading.clear if reading.is_set() else reading.set)()
        self.do(self.world.settle())

    def a_worker_goes_or_comes(self) -> None:
        worker_id = self.random.choice(WORKERS)
        if worker_id not in self.live:
            self.do(self._join(worker_id))
            return
        how = self.random.choice(LOSSES)
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

    def time_passes(self) -> None:
        self._pass_time(self.random.choice([0.25, 1.0, 1.0, 21.0]))

    def _pass_time(self, seconds: float) -> None:
        alive = {worker_id: self._generation(worker_id) for worker_id in self.live}
        self.do(self.world.pass_time(seconds, alive))

    # --- what must hold ---

    def check(self) -> None:
        self.the_books_agree()
        self.each_request_ends_once_and_its_tokens_are_true()
        self.whoever_still_has_an_ended_request_is_told_once()
        self.it_ends_exactly_if_there_is_a_cause()

    def the_books_agree(self) -> None:
        self.world.dispatcher.check_integrity()
        assert not self.running.done()
        assert {worker.worker_id for worker in self.world.dispatcher.workers} == self.live
        assert self.world.dispatcher.in_flight == sum(not self._is_over(asked) for asked in self.asked)

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

    def it_ends_exactly_if_there_is_a_cause(self) -> None:
        for asked in self.asked:
            knows_all = asked.finish is not None and any(part.knows_first for part in asked.parts)
            if knows_all or asked.left or any(part.failed for part in asked.parts):
                assert self._is_over(asked)
            if asked.client.error is not None:
                assert asked.has_cause_to_fail(self.world.clock.now), asked.client.error

    def heal(self) -> None:
        """From here on all clients read and time runs out: everything must end, and be empty."""
        for asked in self.asked:
            asked.client.reading.set()
        self._pass_time(60)
        self.check()
        assert all(asked.client.task.done() and self._is_over(asked) for asked in self.asked)
        self.world.assert_empty()
        assert self.world.dispatcher._flights.book.entries == frozenset()

    def close(self) -> None:
        self.do(self._stop())
        self.loop.close()

    async def _stop(self) -> None:
        for asked in self.asked:
            await asked.client.leave()
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running
        await self.loop.shutdown_asyncgens()


@pytest.mark.parametrize("seed", range(60))
def test_any_order(seed):
    walk = Walk(seed)
    try:
        for _ in range(60):
            walk.step()
        walk.heal()
    finally:
        walk.close()


def test_walks_reach_what_they_are_for():
    """A control of the walk itself: over a few seeds all kinds of end happen, good ends among them."""
    ends = set()
    for seed in range(16):
        walk = Walk(seed)
        for _ in range(60):
            walk.step()
        outcomes = walk.world.recorder.outcomes
        ends |= {outcome.finish or type(outcome.error) for outcome in outcomes}
        walk.close()
    kinds = {EndReason.STOP, EndReason.LENGTH, RequestFailedError, OverloadedError, InvalidRequestError, type(None)}
    assert kinds - ends == set()
