"""Any order of outputs, cancels, failures and deaths: each request ends once, its tokens have no gap or repeat over all
of its attempts, all workers of each attempt have ended it or were told to, nothing fails without a cause, whoever can
go on does, and the books are empty.

A walk plays two workers of each role, and clients; its seed replays it. (Drawn at random and not by Hypothesis: that
repeats itself too much to reach the rarer orders in the time there is.) What a worker does with an attempt is kept in a
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
from gateway.failover import FailoverSettings, RetryReason
from gateway.modes import Mode, ModeRules
from kvtransfer.errors import MessageError
from kvtransfer.messages import Cancel, DecodeRequest, Goodbye, PrefillRequest
from kvtransfer.request_parts import EndReason, RequestSpec
from kvtransfer.worker_facts import LeaveCause
from tests.gateway.cluster_world import RESERVED, Client, World

LOCAL_THRESHOLD = 6
"""Between a prompt alone and one with some output: in auto mode both ways are taken."""
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STREAM_LIMIT = 6
FIRST_TOKEN_TIMEOUT_S = 20
FAILOVER_TIMEOUT_S = 8
LONGEST_DELAY_S = 4.0
"""With workers of both roles there, a request that may go on does so within this: silence is noticed after 2 s, and the
delays of retries come on top."""
FAULTS = [EndReason.FAILED, EndReason.OVERLOADED, EndReason.REJECTED, EndReason.CANCELLED]
LOSSES: list[str | LeaveCause] = ["silence", "malformed", "restart", *LeaveCause]


@dataclass
class Part:
    """One worker's side of an attempt."""

    worker_id: str
    generation: str
    next_index: int
    knows_first: bool = False  # has said the attempt's first token
    ended: bool = False  # said so itself, or was lost
    is_owed: bool | None = None  # a Cancel, as of the attempt's end; None while it runs
    num_excused: int = 0  # further Cancels that there is a reason for


@dataclass
class Try:
    """An attempt as the machine knows it."""

    spec: RequestSpec
    prefill: Part | None
    decode: Part | None = None
    finish: tuple[EndReason, int] | None = None  # of a worker that finished it: reason and number of tokens
    lost_at: float | None = None  # a worker that it needed has ended it with a fault, or was lost
    fault: EndReason | None = None

    @property
    def base(self) -> int:
        return len(self.spec.output_token_ids)

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.prefill, self.decode) if part is not None]

    @property
    def knows_first(self) -> bool:
        return any(part.knows_first for part in self.parts)

    @property
    def has_finished(self) -> bool:
        return self.finish is not None and self.knows_first

    def needs(self, part: Part) -> bool:
        """Prefill not, once decode runs and the first token is known."""
        decode_has_all = self.decode is not None and self.decode.next_index > self.base + 1 and self.knows_first
        return part is self.decode or not decode_has_all

    def lose(self, part: Part, now: float, fault: EndReason | None = None) -> None:
        """`part` is over, without having finished the request."""
        if self.lost_at is None and self.needs(part) and not self.has_finished:
            self.lost_at, self.fault = now, fault


@dataclass
class Asked:
    """A request as the machine knows it."""

    number: int
    client: Client
    request_id: str
    mode: Mode
    asked_at: float
    tries: list[Try] = field(default_factory=list)
    left: bool = False
    was_slow: bool = False
    was_too_early: bool = False  # decode has said more than is kept while the first token isn't known

    def tokens(self, start: int, stop: int) -> list[int]:
        return [(self.number * 31 + index * 7) % 100 for index in range(start, stop)]

    @property
    def last(self) -> Try:
        return self.tries[-1]

    @property
    def num_lost(self) -> int:
        return sum(item.lost_at is not None for item in self.tries)

    def has_finished(self) -> bool:
        return self.last.lost_at is None and self.last.has_finished

    def must_fail(self, max_retries: int) -> bool:
        return self.last.fault is EndReason.REJECTED or self.num_lost > max_retries

    def may_fail(self, now: float, max_retries: int) -> bool:
        is_late = now - self.asked_at >= FIRST_TOKEN_TIMEOUT_S
        has_waited = self.last.lost_at is not None and now - self.last.lost_at >= FAILOVER_TIMEOUT_S
        was_turned_away = self.last.fault is EndReason.OVERLOADED
        has_cause = is_late or has_waited or was_turned_away or self.was_slow or self.was_too_early
        return has_cause or self.must_fail(max_retries)


class Walk:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.max_retries = (3, 0, 1)[seed % 3]
        self.loop = asyncio.new_event_loop()
        self.asked: list[Asked] = []
        self.generations = dict.fromkeys(WORKERS, 0)
        self.live: set[str] = set()
        self.num_seen = 0  # of what the workers were sent
        self.whole_since: float | None = None  # there are workers of both roles
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
            failover=FailoverSettings(self.max_retries, FAILOVER_TIMEOUT_S),
            modes=ModeRules(local_threshold=LOCAL_THRESHOLD),
        )
        self.world = World(ClusterSettings(), bounds)
        self.running = self.loop.create_task(self.world.dispatcher.run(self.world.control))
        for worker_id in WORKERS:
            await self._join(worker_id)

    async def _join(self, worker_id: str) -> None:
        self.generations[worker_id] += 1
        self.live.add(worker_id)
        await self.world.join(worker_id, generation=self._generation(worker_id))

    @property
    def now(self) -> float:
        return self.world.clock.now

    def _generation(self, worker_id: str) -> str:
        return f"g{self.generations[worker_id]}"

    def _is_over(self, asked: Asked) -> bool:
        return any(outcome.request_id == asked.request_id for outcome in self.world.recorder.outcomes)

    def _pick(self) -> tuple[Asked, Try]:
        """Mostly a request that runs and its last attempt; sometimes one that is over, about which a worker or a client
        may not know yet."""
        running = [asked for asked in self.asked if not self._is_over(asked)]
        asked = self.random.choice(running * 3 + self.asked[-3:])
        return asked, self.random.choice([*asked.tries[-2:], *[asked.last] * 3])

    def step(self) -> None:
        """One event, chosen so that most requests come some way before trouble does."""
        moves = {self.ask: 3, self.workers_work: 20, self.a_request_has_trouble: 2, self.a_worker_goes_or_comes: 1}
        moves[self.time_passes] = 2
        if self.asked:
            self.random.choices(list(moves), list(moves.values()))[0]()
        else:
            self.ask()
        self.see_what_was_sent()
        self.check()

    # --- what workers hear ---

    def see_what_was_sent(self) -> None:
        """New attempts. A worker that dies in silence may get some before that is noticed."""
        new, self.num_seen = self.world.control.sent[self.num_seen :], len(self.world.control.sent)
        for worker_id, message in new:
            if isinstance(message, PrefillRequest):
                self._on_attempt(message.request, Mode.DISAGGREGATED).prefill = self._part(worker_id, message.request)
            elif isinstance(message, DecodeRequest) and message.source is None:
                self._on_attempt(message.request, Mode.LOCAL).decode = self._part(worker_id, message.request)
            elif isinstance(message, DecodeRequest):
                tried = self._asked(message.request).last
                assert message.request == tried.spec
                tried.decode = self._part(worker_id, message.request, behind=1)
        for asked in self.asked:
            self._note_the_dead(asked)

    def _asked(self, spec: RequestSpec) -> Asked:
        return next(asked for asked in self.asked if asked.request_id == spec.request_id)

    def _part(self, worker_id: str, spec: RequestSpec, behind: int = 0) -> Part:
        return Part(worker_id, self._generation(worker_id), len(spec.output_token_ids) + behind)

    def _on_attempt(self, spec: RequestSpec, mode: Mode) -> Try:
        asked = self._asked(spec)
        assert asked.mode in (mode, Mode.AUTO), f"{asked.mode} was asked for"
        self._note_the_dead(asked)
        assert spec.attempt == len(asked.tries)
        assert spec.attempt == 0 or asked.last.lost_at is not None, "an attempt was given up without a cause"
        assert list(spec.output_token_ids) == asked.tokens(0, len(spec.output_token_ids))
        assert len(spec.output_token_ids) >= len(asked.client.tokens), "the client would get a token again"
        asked.tries.append(Try(spec, None))
        return asked.last

    def _note_the_dead(self, asked: Asked) -> None:
        for tried in asked.tries[-1:]:
            for part in tried.parts:
                if part.worker_id not in self.live and not part.ended:
                    self._part_dies(tried, part, excused=1)

    def _part_dies(self, tried: Try, part: Part, excused: int) -> None:
        part.ended = True
        part.num_excused += excused
        tried.lose(part, self.now)

    # --- what can happen ---

    def ask(self, max_tokens: int | None = None) -> None:
        max_tokens = max_tokens or self.random.choice([1, 2, 6, 12])
        num_sent = len(self.world.control.sent)
        mode = self.random.choice(list(Mode))
        client = self.do(self.world.ask(max_tokens=max_tokens, mode=mode))
        sent = [message for _, message in self.world.control.sent[num_sent:]]
        sent = [message for message in sent if isinstance(message, PrefillRequest | DecodeRequest)]
        sent = [message for message in sent if not message.request.attempt]
        if not sent:
            assert client.error is not None
            return
        if isinstance(sent[0], PrefillRequest):
            assert (sent[0].target is None) == (max_tokens == 1)
        self.asked.append(Asked(len(self.asked), client, sent[0].request.request_id, mode, self.now))

    def _say(self, asked: Asked, tried: Try, part: Part, start: int, stop: int, end: EndReason | None) -> None:
        """A worker speaks, whether or not anybody listens: a Cancel may be on its way."""
        assert not part.ended
        if end is EndReason.STOP or end is EndReason.LENGTH:
            tried.finish = (end, stop)
        if self._is_over(asked) or tried is not asked.last or tried.lost_at is not None:
            part.num_excused += 1
        part.next_index = max(part.next_index, stop)
        part.knows_first = part.knows_first or start <= tried.base < stop
        if tried.prefill is not None and part.next_index - tried.base > STREAM_LIMIT and not tried.knows_first:
            asked.was_too_early = True
        part.ended = end is not None
        if end in FAULTS:
            tried.lose(part, self.now, end)
        tokens = asked.tokens(start, stop)
        self.do(self.world.say(part.worker_id, tried.spec, start, tokens, end, generation=part.generation))

    def workers_work(self) -> None:
        asked, tried = self._pick()
        if tried.finish is not None and tried.finish[1] == tried.base + 1:
            return
        if self.random.random() < 0.4 and tried.prefill is not None and not tried.prefill.ended:
            self._work_as_prefill(asked, tried, tried.prefill, is_last=self.random.random() < 0.1)
        elif tried.decode is not None and not tried.decode.ended:
            self._work_as_decode(asked, tried, tried.decode, self.random.randint(0, 3), self.random.randint(0, 2))

    def _work_as_prefill(self, asked: Asked, tried: Try, part: Part, is_last: bool) -> None:
        """The first token, alone or with the end of the request; later the hand-over."""
        base = tried.base
        if part.next_index == base + 1:
            self._say(asked, tried, part, base + 1, base + 1, EndReason.HANDED_OVER)
        elif tried.decode is None:
            self._say(asked, tried, part, base, base + 1, EndReason.LENGTH)
        else:  # decode speaks only if the first token wasn't the last
            is_last = is_last and tried.decode.next_index == base + 1
            self._say(asked, tried, part, base, base + 1, EndReason.STOP if is_last else None)

    def _work_as_decode(self, asked: Asked, tried: Try, part: Part, count: int, repeats: int) -> None:
        """It has room; or the next tokens, perhaps with some that were said before; at times an early end."""
        max_tokens = tried.spec.sampling.max_tokens
        if count == 0:
            saying = self.world.say(part.worker_id, tried.spec, tried.base, generation=part.generation, events=RESERVED)
            part.num_excused += self._is_over(asked) or tried is not asked.last or tried.lost_at is not None
            self.do(saying)
            return
        stop = min(max_tokens, part.next_index + count)
        end = EndReason.LENGTH if stop == max_tokens else EndReason.STOP if (count, repeats) == (2, 2) else None
        self._say(asked, tried, part, max(tried.base, part.next_index - repeats), stop, end)

    def a_request_has_trouble(self) -> None:
        asked, tried = self._pick()
        kind = self.random.randrange(3)
        if kind == 0:
            self._a_worker_fails(asked, tried)
        elif kind == 1:
            self._the_client_leaves(asked)
        else:
            self._the_client_pauses(asked)

    def _a_worker_fails(self, asked: Asked, tried: Try) -> None:
        part = self.random.choice(tried.parts)
        if not part.ended:
            at = max(part.next_index - (part is tried.decode), tried.base)
            self._say(asked, tried, part, at, at, self.random.choice(FAULTS))

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
            for tried in asked.tries:
                for part in (part for part in tried.parts if part.worker_id == worker_id and not part.ended):
                    # a deadline may come before the silence is noticed
                    self._part_dies(tried, part, excused=how == "silence")
        self._lose(worker_id, how)

    def _lose(self, worker_id: str, how: str | LeaveCause) -> None:
        if how == "silence":
            self._pass_time(2.5)
        elif how == "restart":
            self.do(self._join(worker_id))
        else:
            message = MessageError("bad") if how == "malformed" else Goodbye(self._generation(worker_id), "bye", how)
            self.do(self.world.hear(worker_id, message))

    def time_passes(self) -> None:
        self._pass_time(self.random.choice([0.25, 1.0, 1.0, 1.0, 21.0]))

    def _pass_time(self, seconds: float) -> None:
        alive = {worker_id: self._generation(worker_id) for worker_id in self.live}
        self.do(self.world.pass_time(seconds, alive))

    # --- what must hold ---

    def check(self) -> None:
        self.the_books_agree()
        self.each_request_ends_once_and_its_tokens_are_true()
        self.whoever_still_has_an_ended_attempt_is_told_once()
        self.it_ends_exactly_if_there_is_a_cause()
        self.who_can_go_on_does()

    def the_books_agree(self) -> None:
        self.world.dispatcher.check_integrity()
        assert not self.running.done()
        assert {worker.worker_id for worker in self.world.dispatcher.workers} == self.live
        assert self.world.dispatcher.in_flight == sum(not self._is_over(asked) for asked in self.asked)

    def each_request_ends_once_and_its_tokens_are_true(self) -> None:
        for asked in self.asked:
            client = asked.client
            assert client.tokens == asked.tokens(0, len(client.tokens))
            ends = [item for item in self.world.recorder.outcomes if item.request_id == asked.request_id]
            assert len(ends) <= 1
            assert client.finish is None or client.error is None
            if client.finish is not None:
                assert (client.finish, len(client.tokens)) == asked.last.finish
            if client.reading.is_set() and not asked.left:
                assert client.task.done() == bool(ends) == bool(client.finish or client.error)

    def whoever_still_has_an_ended_attempt_is_told_once(self) -> None:
        for asked in self.asked:
            for tried in asked.tries:
                is_over = self._is_over(asked) or tried.lost_at is not None
                for part in tried.parts:
                    self._check_cancels(tried, part, is_over=is_over)

    def _check_cancels(self, tried: Try, part: Part, *, is_over: bool) -> None:
        cancel = Cancel(tried.spec.request_id, tried.spec.attempt)
        cancels = self.world.control.to(part.worker_id, Cancel).count(cancel)
        if not is_over:
            assert cancels == 0
            return
        if part.is_owed is None:
            part.is_owed = not part.ended
        assert part.is_owed <= cancels <= part.is_owed + part.num_excused

    def it_ends_exactly_if_there_is_a_cause(self) -> None:
        for asked in self.asked:
            if asked.has_finished() or asked.left or asked.must_fail(self.max_retries):
                assert self._is_over(asked)
            if asked.client.error is not None:
                assert asked.may_fail(self.now, self.max_retries), asked.client.error

    def who_can_go_on_does(self) -> None:
        if {worker_id.split("-")[0] for worker_id in self.live} != {"prefill", "decode"}:
            self.whole_since = None
            return
        self.whole_since = self.now if self.whole_since is None else self.whole_since
        for asked in self.asked:
            if asked.last.lost_at is not None and not self._is_over(asked):
                assert self.now - max(asked.last.lost_at, self.whole_since) < LONGEST_DELAY_S

    def heal(self) -> None:
        """From here on all clients read and time runs out: everything must end, and be empty."""
        for asked in self.asked:
            asked.client.reading.set()
        self._pass_time(60)
        self.see_what_was_sent()
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
    ends, modes, retries, num_resumed = set(), set(), set(), 0
    for seed in range(48):
        walk = Walk(seed)
        for _ in range(60):
            walk.step()
        outcomes = walk.world.recorder.outcomes
        ends |= {outcome.finish or type(outcome.error) for outcome in outcomes}
        modes |= {(outcome.mode, outcome.phases.retry_s is None) for outcome in outcomes if outcome.finish is not None}
        retries |= set(walk.world.recorder.retries)
        num_resumed += sum(outcome.finish is not None and outcome.phases.retry_s is not None for outcome in outcomes)
        walk.close()
    kinds = {EndReason.STOP, EndReason.LENGTH, RequestFailedError, OverloadedError, InvalidRequestError, type(None)}
    assert kinds - ends == set()
    assert modes == {(mode, is_first) for mode in (Mode.LOCAL, Mode.DISAGGREGATED) for is_first in (True, False)}
    assert retries == set(RetryReason)
    assert num_resumed >= 5, "requests that finish behind a lost attempt"
