"""The decode scheduler under any order of events: arrivals, steps, cancels, receptions, time."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.scheduler import CloseReception, ExpectOffer, GrantKv
from engine.request import RequestState
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.messages import EndReason
from tests.lifecycle.ledger import Ledger
from tests.lifecycle.makers import EOS, Decode

MAX_SEQS, LEASE = 3, 4.0


class DecodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Decode(num_blocks=6, block_size=4, max_num_seqs=MAX_SEQS, max_waiting=3, lease=LEASE)
        self.ledger = Ledger()
        self.now = 0.0
        self.jobs: dict = {}
        self.receiving: set[str] = set()  # receptions that the receiver still writes for
        self.offered: set[str] = set()
        self.granted: set[str] = set()
        self.closed: set[str] = set()

    # --- what may happen

    @rule(
        num_prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        num_resumed=st.integers(0, 3),
        gateway=st.integers(0, 1),
    )
    def arrive(self, num_prompt, max_tokens, num_resumed, gateway):
        request_id = f"r{len(self.jobs)}"
        resumed = [50] * min(num_resumed, max_tokens - 1)
        self.ledger.born(request_id, resumed)
        self.jobs[request_id] = self.world.add(
            request_id, num_prompt, self.now, gateway=f"gw{gateway}", offered=False, max_tokens=max_tokens
        )

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
        assert len(rows) <= MAX_SEQS
        for row in rows:
            assert row.request.state is RequestState.RUNNING
            assert row.count == 1
            assert row.samples
            assert row.stop <= len(row.request.block_ids) * 4, "a token without a place for its KV"
        scheduler.complete(rows, tokens[: len(rows)], self.now)
        said = {item.output.request_id for item in scheduler._outputs}
        assert said >= {row.request.key[0] for row in rows}, "a step without a word"

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
        self._end_reception(request_id, outcome, token_id)

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
        assert self.world.scheduler.num_waiting <= 3
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
            case CloseReception(key):
                assert key[0] not in self.closed, "closed twice"
                self.closed.add(key[0])

    def _end_reception(self, request_id, outcome, token_id) -> None:
        self.receiving.discard(request_id)
        was_alive = request_id in self.ledger.alive
        has_arrived = outcome is ReceptionOutcome.ARRIVED
        self.world.ended(request_id, outcome, token_id if has_arrived else None, self.now)
        if was_alive and not has_arrived:
            assert self._after_outputs().ends[request_id] is EndReason.FAILED

    def teardown(self):
        """The world heals: all receptions are answered, and every request ends in a bounded number of steps."""
        for _ in range(200):
            self.nothing_is_lost()
            for request_id in sorted(self.receiving - self.offered - self.closed):
                self._offer(request_id)
            for request_id in sorted(self.receiving & (self.granted | self.closed)):
                arrives = request_id in self.granted
                outcome = ReceptionOutcome.ARRIVED if arrives else ReceptionOutcome.CLOSED
                self._end_reception(request_id, outcome, 40)
                self.nothing_is_lost()
            self.step([50] * MAX_SEQS)
            self.nothing_is_lost()
            if not self.receiving and not self.ledger.alive:
                break
        self.ledger.check_all_have_ended()
        self.world.check_all_is_empty()
        for request_id, tokens in self.ledger.tokens.items():
            assert len(tokens) <= self.jobs[request_id].sampling.max_tokens


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
