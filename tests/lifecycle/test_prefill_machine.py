"""The prefill scheduler under any order of events: arrivals, steps, cancels, transfer events, time."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.request import RequestState, StepResult
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.request_parts import EndReason
from prefill.scheduler import OLDEST_SHARE, AbortTransfer, OpenTransfer, SendFirstToken
from tests.lifecycle.ledger import Ledger
from tests.lifecycle.makers import EOS, TARGET, Prefill
from tests.lifecycle.paper_pool import PaperPool

BUDGET, MAX_SEQS = 5, 4
PROMPTS = [[10] * 18, [10] * 9 + [11] * 9, [12] * 18]


class PrefillMachine(RuleBasedStateMachine):
    MAX_PARTIAL: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.world = Prefill(
            num_blocks=6,
            block_size=4,
            max_num_batched_tokens=BUDGET,
            max_num_partial_prefills=self.MAX_PARTIAL,
            max_num_seqs=MAX_SEQS,
            max_waiting=3,
            share_prefixes=True,
            by_priority=True,
        )
        self.paper = PaperPool(4, self.world.pool)
        self.ledger = Ledger()
        self.now = 0.0
        self.jobs: dict = {}
        self.open: set[str] = set()  # transfers that the sender still reads for
        self.token_sent: set[str] = set()
        self.aborted: set[str] = set()

    # --- what may happen

    @rule(
        prompt=st.sampled_from(PROMPTS),
        num_prompt=st.integers(1, 18),
        has_target=st.booleans(),
        max_tokens=st.integers(1, 3),
        num_resumed=st.integers(0, 2),
        gateway=st.integers(0, 1),
        priority=st.integers(0, 1),
        num_siblings=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def arrive(self, prompt, num_prompt, has_target, max_tokens, num_resumed, gateway, priority, num_siblings):
        request_id = f"r{len(self.jobs)}"
        resumed = [50] * min(num_resumed, max_tokens - 1)
        self.ledger.born(request_id, resumed)
        for index in range(1, num_siblings + 1):
            self.ledger.born(f"{request_id}.{index}", resumed)
        self.world.add(
            request_id,
            num_prompt,
            self.now,
            TARGET if has_target else None,
            gateway=f"gw{gateway}",
            max_tokens=max_tokens,
            resumed=resumed,
            prompt=prompt[:num_prompt],
            priority=priority,
            num_siblings=num_siblings,
        )
        self.jobs |= {job.spec.request_id: job for job in self.world.added}

    @precondition(lambda self: self.ledger.alive)
    @rule(data=st.data())
    def repeat(self, data):
        request_id = data.draw(st.sampled_from(self.ledger.alive))
        if self.jobs[request_id].leader is not None:
            return
        self.world.add(request_id, self.jobs[request_id].num_prompt, self.now)

    @rule(tokens=st.lists(st.sampled_from([50, 51, EOS]), min_size=MAX_SEQS, max_size=MAX_SEQS))
    def step(self, tokens):
        scheduler = self.world.scheduler
        rows = scheduler.schedule(self.now)
        assert sum(row.count for row in rows) <= BUDGET
        assert len(rows) <= MAX_SEQS
        for row in rows:
            if row.count == 0:
                assert row.request.state is RequestState.FOLLOWING
                continue
            assert row.request.state is RequestState.RUNNING
            self.paper.write(row.request, row.start, row.stop)
        if rows:
            self._check_the_oldest(rows)
        sampled = [token if row.samples else None for row, token in zip(rows, tokens, strict=False)]
        scheduler.complete(rows, StepResult(sampled), self.now)
        begun = self._begun()
        assert self.MAX_PARTIAL is None or len(begun) <= self.MAX_PARTIAL

    def _check_the_oldest(self, rows) -> None:
        """It has its share; without a place for it, the oldest of those that have one."""
        running, begun = self.world.scheduler._running, self._begun()
        may_begin = self.MAX_PARTIAL is None or len(begun) < self.MAX_PARTIAL
        oldest = running[0] if may_begin else begun[0]
        least = min(oldest.num_uncomputed, max(1, BUDGET // OLDEST_SHARE))
        assert sum(row.count for row in rows if row.request is oldest) >= least, "the oldest starves"

    def _begun(self) -> list:
        return [job for job in self.world.scheduler._running if job.num_computed > job.num_cached]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.scheduler.cancel((data.draw(st.sampled_from(sorted(self.jobs))), 0), self.now)

    @rule(gateway=st.integers(0, 1))
    def lose_gateway(self, gateway):
        self.world.scheduler.cancel_all_of(f"gw{gateway}", self.now)
        assert all(self.jobs[name].gateway != f"gw{gateway}" for name in self._after_outputs().alive)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(list(TransferOutcome)))
    def transfer_ends(self, data, outcome):
        self._end_transfer(data.draw(st.sampled_from(sorted(self.open))), outcome)

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
        for request_id in self.open:
            job = self.world.scheduler.find((request_id, 0))
            assert job is self.jobs[request_id], "freed while the sender may read"
            assert job.state is not RequestState.ENDED
        for request_id in self.ledger.alive:
            assert self.world.scheduler.find((request_id, 0)) is self.jobs[request_id]
        for job in self.jobs.values():
            if job.leader is not None:
                assert not job.block_ids
                assert self.world.scheduler.find(job.leader.key) is job.leader, "its leader has left it behind"
        assert len(self.world.scheduler._waiting) <= 3

    def _after_outputs(self) -> Ledger:
        self.ledger.take(self.world.scheduler.take_outputs())
        return self.ledger

    def _obey(self, command) -> None:
        match command:
            case OpenTransfer(job):
                assert job.key[0] not in self.open
                self.paper.check(job, job.num_cached)
                self.open.add(job.key[0])
            case SendFirstToken(key, token_id, _, siblings):
                assert key[0] in self.open
                job = self.jobs[key[0]]
                self.paper.check(job, job.num_prefill)
                for member in (job, *job.followers):
                    token = token_id if member is job else siblings[member.spec.request_id].token_id
                    assert member.output_token_ids[job.num_resumed :] == [token] or member.is_over
                self.token_sent.add(key[0])
            case AbortTransfer(key):
                assert key[0] not in self.aborted, "aborted twice"
                self.aborted.add(key[0])

    def _end_transfer(self, request_id, outcome) -> None:
        self.open.discard(request_id)
        job = self.jobs[request_id]
        alive = [member.spec.request_id for member in (job, *job.followers) if not member.is_over]
        self.world.ended(request_id, outcome, self.now)
        well = outcome is TransferOutcome.DONE and request_id in self.token_sent
        for name in alive:
            assert self._after_outputs().ends[name] is (EndReason.HANDED_OVER if well else EndReason.FAILED)

    def teardown(self):
        """The world heals: all transfers are answered and all prompts computed, in a bounded number of steps."""
        for _ in range(200):
            self.step([50] * MAX_SEQS)
            self.nothing_is_lost()
            for request_id in sorted(self.open):
                if request_id in self.token_sent or request_id in self.aborted:
                    self._end_transfer(request_id, TransferOutcome.DONE)
            if not self.open and not self.ledger.alive:
                break
        self.ledger.check_all_have_ended()
        self.world.check_all_is_empty()


class OneByOneMachine(PrefillMachine):
    """A prompt that is begun is done before another one is begun that takes more than a step."""

    MAX_PARTIAL = 1


class TwoByTwoMachine(PrefillMachine):
    MAX_PARTIAL = 2


ORDERS = settings(max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestPrefillMachine = PrefillMachine.TestCase
TestOneByOneMachine = OneByOneMachine.TestCase
TestTwoByTwoMachine = TwoByTwoMachine.TestCase
for _test in (TestPrefillMachine, TestOneByOneMachine, TestTwoByTwoMachine):
    _test.settings = ORDERS
