"""The prefill scheduler under any order of events: arrivals, steps, cancels, transfer events, time."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.request import RequestState, StepResult
from kvtransfer.messages import EndReason
from kvtransfer.outgoing import TransferOutcome
from prefill.scheduler import OLDEST_SHARE, AbortTransfer, OpenTransfer, SendFirstToken
from tests.lifecycle.ledger import Ledger
from tests.lifecycle.makers import EOS, TARGET, Prefill
from tests.lifecycle.paper_pool import PaperPool

BUDGET = 5
PROMPTS = [[10] * 18, [10] * 9 + [11] * 9, [12] * 18]


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Prefill(
            num_blocks=6,
            block_size=4,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=3,
            max_waiting=3,
            share_prefixes=True,
            by_priority=True,
        )
        self.paper = PaperPool(4)
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
    )
    def arrive(self, prompt, num_prompt, has_target, max_tokens, num_resumed, gateway, priority):
        request_id = f"r{len(self.jobs)}"
        resumed = [50] * min(num_resumed, max_tokens - 1)
        self.ledger.born(request_id, resumed)
        self.jobs[request_id] = self.world.add(
            request_id,
            num_prompt,
            self.now,
            TARGET if has_target else None,
            gateway=f"gw{gateway}",
            max_tokens=max_tokens,
            resumed=resumed,
            prompt=prompt[:num_prompt],
            priority=priority,
        )

    @precondition(lambda self: self.ledger.alive)
    @rule(data=st.data())
    def repeat(self, data):
        request_id = data.draw(st.sampled_from(self.ledger.alive))
        self.world.add(request_id, self.jobs[request_id].num_prompt, self.now)

    @rule(tokens=st.lists(st.sampled_from([50, 51, EOS]), min_size=3, max_size=3))
    def step(self, tokens):
        scheduler = self.world.scheduler
        rows = scheduler.schedule(self.now)
        assert sum(row.count for row in rows) <= BUDGET
        for row in rows:
            assert row.request.state is RequestState.RUNNING
            self.paper.write(row.request, row.start, row.stop)
        if rows:
            least = min(rows[0].request.num_uncomputed, max(1, BUDGET // OLDEST_SHARE))
            assert rows[0].count >= least, "the oldest starves"
        sampled = [token if row.samples else None for row, token in zip(rows, tokens, strict=False)]
        scheduler.complete(rows, StepResult(sampled), self.now)

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
        assert self.world.scheduler.num_waiting <= 3

    def _after_outputs(self) -> Ledger:
        self.ledger.take(self.world.scheduler.take_outputs())
        return self.ledger

    def _obey(self, command) -> None:
        match command:
            case OpenTransfer(job):
                assert job.key[0] not in self.open
                self.paper.check(job, job.num_cached)
                self.open.add(job.key[0])
            case SendFirstToken(key, token_id):
                assert key[0] in self.open
                self.paper.check(self.jobs[key[0]], self.jobs[key[0]].num_prefill)
                assert self.jobs[key[0]].output_token_ids == [*self.jobs[key[0]].spec.output_token_ids, token_id]
                self.token_sent.add(key[0])
            case AbortTransfer(key):
                assert key[0] not in self.aborted, "aborted twice"
                self.aborted.add(key[0])

    def _end_transfer(self, request_id, outcome) -> None:
        self.open.discard(request_id)
        was_alive = request_id in self.ledger.alive
        self.world.ended(request_id, outcome, self.now)
        if was_alive:
            well = outcome is TransferOutcome.DONE and request_id in self.token_sent
            assert self._after_outputs().ends[request_id] is (EndReason.HANDED_OVER if well else EndReason.FAILED)

    def teardown(self):
        """The world heals: all transfers are answered and all prompts computed, in a bounded number of steps."""
        for _ in range(200):
            self.step([50, 50, 50])
            self.nothing_is_lost()
            for request_id in sorted(self.open):
                if request_id in self.token_sent or request_id in self.aborted:
                    self._end_transfer(request_id, TransferOutcome.DONE)
            if not self.open and not self.ledger.alive:
                break
        self.ledger.check_all_have_ended()
        self.world.check_all_is_empty()


TestPrefillMachine = PrefillMachine.TestCase
TestPrefillMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
