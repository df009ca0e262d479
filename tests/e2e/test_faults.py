"""Each worker is killed at each event of a request's life. `make faults` tries all other faults as well."""

import pytest

from kvtransfer.faults import FaultAction
from kvtransfer.request_parts import LifetimeEvent
from tests.e2e.cluster import DECODE, GATEWAY, PREFILL, running_cluster
from tests.e2e.conftest import FAULT_ROWS
from tests.e2e.fault_cases import ALL_CASES, FaultCase, cases_of, events_recorded_by
from tests.e2e.fault_run import Expectations, await_fault, fault_flags, run_case
from tests.e2e.load import OutcomeKind, concurrently

CASES = [
    *cases_of(FaultAction.KILL),
    FaultCase(PREFILL, FaultAction.DIE_KV, LifetimeEvent.SCHEDULED),
    FaultCase(DECODE, FaultAction.DIE, LifetimeEvent.RUNNING),
    FaultCase(DECODE, FaultAction.STOP, LifetimeEvent.SPLICED),
]


@pytest.fixture(scope="module")
def faulty(tiny_model, tmp_path_factory):
    with running_cluster(fault_flags(tiny_model), tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(faulty):
    return Expectations.ask(faulty)


def test_every_event_is_recorded_by_some_role_and_so_has_its_cases():
    assert events_recorded_by(PREFILL) | events_recorded_by(DECODE) == set(LifetimeEvent)
    assert {case.event for case in ALL_CASES if case.event} == set(LifetimeEvent)
    assert len(ALL_CASES) == len({str(case) for case in ALL_CASES})


def test_without_a_fault_all_is_right_and_no_proof_is_found(faulty, expected):
    """The negative control: what proves a fault must not be there."""
    with concurrently(faulty.http, expected.calls, expected.answers) as streams:
        assert [stream.result().kind for stream in streams] == [OutcomeKind.RIGHT] * len(streams)
    assert [str(case) for case in ALL_CASES if case.has_happened(faulty[case.role])] == []
    with pytest.raises(AssertionError, match="has happened"):
        await_fault(faulty, CASES[0], within_s=0.2)
    faulty.wait_pools_empty()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_costs_at_most_the_streams_it_hits_and_is_recovered_from(faulty, expected, case, request):
    row = run_case(faulty, case, expected)
    request.config.stash[FAULT_ROWS].append(row)
    assert row.num_running > 0 or case.event is LifetimeEvent.ENDED, "there was no load when it happened"
    if case.role != GATEWAY:
        assert row.kinds.keys() <= {OutcomeKind.RIGHT, OutcomeKind.REFUSED, OutcomeKind.ERROR}
