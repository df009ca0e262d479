"""The decode scheduler under any order of events: arrivals, steps, cancels, receptions, time.

The pool is small, so requests lose their blocks to each other all the time; prompts are alike, so blocks are shared.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.scheduler import CloseReception, ExpectOffer, GrantKv
from engine.request import RequestState, StepResult
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.request_parts import EndReason
from tests.lifecycle.ledger import Ledger
from tests.lifecycle.makers import EOS, Decode
from tests.lifecycle.paper_pool import PaperPool

MAX_SEQS, MAX_TOKENS, LEASE = 4, 5, 4.0
PROMPTS = [[10] * 12, [10] * 7 + [11] * 5, [12] * 12]


class DecodeMachine(RuleBasedStateMachine):
    """What is preempted is computed again."""

    SWAP_BLOCKS = 0
    MAX_PARTIAL = 1

    def __init__(self) -> None:
        super().__init__()
        self.world = Decode(
            num_blocks=6,
            block_size=4,
            swap_blocks=self.SWAP_BLOCKS,
            max_num_prefill_tokens=MAX_TOKENS,
            max_num_partial_prefills=self.MAX_PARTIAL,
            max_num_seqs=MAX_SEQS,
            max_waiting=3,
            lease=LEASE,
            share_prefixes=True,
            by_priority=True,
        )
        self.paper = PaperPool(4, self.world.pool)
        self.ledger = Ledger()
        self.now = 0.0
        self.jobs: dict = {}
        self.receiving: set[str] = set()  # receptions that the receiver still writes for
        self.offered: set[str] = set()
        self.granted: set[str] = set()
        self.closed: set[str] = set()

    # --- what may happen

    @rule(
        prompt=st.sampled_from(PROMPTS),
        num_prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        num_resumed=st.integers(0, 3),
        gateway=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "a tenant"]),
        priority=st.integers(0, 1),
        local=st.booleans(),
        num_siblings=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def arrive(self, prompt, num_prompt, max_tokens, num_resumed, gateway, salt, priority, local, num_siblings):
        request_id = f"r{len(self.jobs)}"
        resumed = [50] * min(num_resumed, max_tokens - 1)
        self.ledger.born(request_id, resumed)
        for index in range(1, num_siblings + 1):
            self.ledger.born(f"{request_id}.{index}", resumed)
        self.world.add(
            request_id,
            now=self.now,
            gateway=f"gw{gateway}",
            offered=False,
            max_tokens=max_tokens,
            resumed=resumed,
            prompt=prompt[:num_prompt],
            cache_salt=salt,
            priority=priority,
            local=local,
            num_siblings=num_siblings,
        )
        self.jobs |= {job.spec.request_id: job for job in self.world.added}

    @precondition(lambda self: self.receiving - self.offered)
    @rule(data=st.data())
    def offer(self, data):
        self._offer(data.draw(st.sampled_from(sorted(self.receiving - self.offered))))

    def _offer(self, request_id) -> None:
        self.offered.add(request_id)
        self.world.offer(request_id, self.now)

    @precondition(lambda self: self.ledger.alive)
    @rule(data=st.data())
    def repeat(self, data):
        self.world.add(data.draw(st.sampled_from(self.ledger.alive)), 1, self.now, offered=False)

    @rule(tokens=st.lists(st.sampled_from([50, 51, 52, EOS]), min_size=MAX_SEQS, max_size=MAX_SEQS))
    def step(self, tokens):
        scheduler = self.world.scheduler
        rows = scheduler.schedule(self.now)
        self.paper.carry_out(scheduler.take_moves())
        self.paper.copy(scheduler.take_copies())
        assert len(rows) <= MAX_SEQS
        assert sum(row.count for row in rows) <= MAX_TOKENS + MAX_SEQS
        assert sum(1 for row in rows if not row.samples) <= self.MAX_PARTIAL
        assert len({row.request.key for row in rows}) == len(rows)
        for row in rows:
            if row.count == 0:
                assert row.request.state is RequestState.FOLLOWING
                continue
            assert row.request.state is RequestState.RUNNING
            self.paper.write(row.request, row.start, row.stop)
        self._check_progress(rows)
        sampling = {row.request.key[0] for row in rows if row.samples and not row.request.is_over}
        sampled = [token if row.samples else None for row, token in zip(rows, tokens, strict=False)]
        scheduler.complete(rows, StepResult(sampled), self.now)
        said = {item.output.request_id for item in scheduler._outputs}
        assert said >= sampling, "a token without a word"

    def _check_progress(self, rows) -> None:
        """Whoever stands first among those that may run takes part, unless the rest of the pool is not to be had."""
        scheduler = self.world.scheduler
        able = [job for job in self.jobs.values() if job.state in (RequestState.RUNNING, RequestState.PREEMPTED)]
        elsewhere = [job for job in self.jobs.values() if job.state in (RequestState.RECEIVING, RequestState.CLOSING)]
        if able and not elsewhere:
            first = min(able, key=scheduler._place)
            running = [job for job in able if job.state is RequestState.RUNNING]
            assert rows, f"nothing runs, although {first.key} could"
            if first in running:
                assert first in [row.request for row in rows], f"{first.key} is first, and sits out"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.scheduler.cancel((data.draw(st.sampled_from(sorted(self.jobs))), 0), self.now)

    @rule(gateway=st.integers(0, 1))
    def lose_gateway(self, gateway):
        self.world.scheduler.cancel_all_of(f"gw{gateway}", self.now)
        assert all(self.jobs[name].gateway != f"gw{gateway}" for name in self._after_outputs().alive)

    @precondition(lambda self: self.receiving)
    @rule(data=st.data(), token_id=st.sampled_from([40, EOS]), arrives=st.booleans())
    def reception_ends(self, data, token_id, arrives):
        request_id = data.draw(st.sampled_from(sorted(self.receiving)))
        failures = [outcome for outcome in ReceptionOutcome if outcome is not ReceptionOutcome.ARRIVED]
        may_arrive = arrives and request_id in self.granted
        outcome = ReceptionOutcome.ARRIVED if may_arrive else data.draw(st.sampled_from(failures))
        followers = [follower.spec.request_id for follower in self.jobs[request_id].followers]
        siblings = {name: data.draw(st.sampled_from([41, EOS])) for name in followers if data.draw(st.booleans())}
        self._end_reception(request_id, outcome, token_id, siblings)

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds):
        self.now += seconds
        self.world.scheduler.expire(self.now)

    # --- what must hold

    @invariant()
    def nothing_is_lost(self):
        self._after_outputs()
        for command in self.world.scheduler.take_commands():
            self._obey(command)
        self.world.check()
        for request_id in self.receiving:
            job = self.world.scheduler.find((request_id, 0))
            assert job is self.jobs[request_id], "freed while the receiver may write"
            assert bool(job.block_ids) == (request_id in self.granted)
        for request_id in self.ledger.alive:
            assert self.world.scheduler.find((request_id, 0)) is self.jobs[request_id]
        assert self.world.scheduler.take_moves() == [], "decided outside of a step"
        for job in self.jobs.values():
            if job.leader is not None:
                assert job.state is RequestState.FOLLOWING
                assert not job.block_ids
                assert self.world.scheduler.find(job.leader.key) is job.leader, "its leader has left it behind"
        assert len(self.world.scheduler._waiting) <= 3
        assert self.world.scheduler.num_running <= MAX_SEQS

    def _after_outputs(self) -> Ledger:
        self.ledger.take(self.world.scheduler.take_outputs())
        return self.ledger

    def _obey(self, command) -> None:
        match command:
            case ExpectOffer(job):
                assert job.key[0] not in self.receiving
                self.receiving.add(job.key[0])
            case GrantKv(job):
                assert job.key[0] in self.receiving, "granted behind the end of its reception"
                assert job.key[0] not in self.granted, "granted twice"
                assert job.key[0] in self.offered, "room was kept for what prefill has not admitted"
                self.granted.add(job.key[0])
                self.paper.check(job, job.num_cached)
            case CloseReception(key):
                assert key[0] not in self.closed, "closed twice"
                self.closed.add(key[0])

    def _end_reception(self, request_id, outcome, token_id, siblings=None) -> None:
        self.receiving.discard(request_id)
        has_arrived = outcome is ReceptionOutcome.ARRIVED
        job = self.jobs[request_id]
        alive = [member.spec.request_id for member in (job, *job.followers) if not member.is_over]
        unsaid = [name for name in alive if name != request_id and name not in (siblings or {})]
        if has_arrived and request_id in self.granted:
            self.paper.write(job, job.num_cached, job.num_prefill)
        event = token_id if has_arrived else None
        self.world.ended(request_id, outcome, event, self.now, sibling_tokens=siblings if has_arrived else None)
        for name in unsaid if has_arrived else alive:
            assert self._after_outputs().ends[name] is EndReason.FAILED

    def teardown(self):
        """The world heals: all receptions are answered, and every request ends in a bounded number of steps."""
        for _ in range(200):
            self.nothing_is_lost()
            for request_id in sorted(self.receiving - self.offered - self.closed):
                self._offer(request_id)
            for request_id in sorted(self.receiving & (self.granted | self.closed)):
                arrives = request_id in self.granted
                outcome = ReceptionOutcome.ARRIVED if arrives else ReceptionOutcome.CLOSED
                siblings = {follower.spec.request_id: 41 for follower in self.jobs[request_id].followers}
                self._end_reception(request_id, outcome, 40, siblings)
                self.nothing_is_lost()
            self.step([50] * MAX_SEQS)
            self.nothing_is_lost()
            if not self.receiving and not self.ledger.alive:
                break
        self.ledger.check_all_have_ended()
        self.world.check_all_is_empty()
        for request_id, tokens in self.ledger.tokens.items():
            assert len(tokens) <= self.jobs[request_id].sampling.max_tokens


class SwappingMachine(DecodeMachine):
    """What is preempted is copied to the host, all of it."""

    SWAP_BLOCKS = 24


class FallingBackMachine(DecodeMachine):
    """The host has room for some of it, and prompts are computed side by side."""

    SWAP_BLOCKS = 2
    MAX_PARTIAL = 2


ORDERS = settings(max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestDecodeMachine = DecodeMachine.TestCase
TestSwappingMachine = SwappingMachine.TestCase
TestFallingBackMachine = FallingBackMachine.TestCase
for _test in (TestDecodeMachine, TestSwappingMachine, TestFallingBackMachine):
    _test.settings = ORDERS
