"""Where a request's time went: phases from two workers' readings, which add up."""

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import Metrics
from gateway.observer import Phases, RequestOutcome
from kvtransfer.request_parts import EndReason, LifetimeEvent
from tests.gateway.test_metrics import values_of

PREFILL_READINGS = {LifetimeEvent.RECEIVED: 0.0, LifetimeEvent.SCHEDULED: 0.25, LifetimeEvent.FIRST_TOKEN: 1.0}
DECODE_READINGS = {
    LifetimeEvent.RECEIVED: 0.0,
    LifetimeEvent.RESERVED: 0.125,
    LifetimeEvent.FIRST_FRAME: 0.5,
    LifetimeEvent.SPLICED: 1.25,
    LifetimeEvent.RUNNING: 1.375,
    LifetimeEvent.ENDED: 2.25,
}


def sum_of(phases: Phases) -> float:
    return sum(seconds for seconds in asdict(phases).values() if seconds is not None)


def test_kv_that_moves_while_prefill_computes_takes_no_time_of_its_own():
    phases = Phases.of(0.5, 3.0, PREFILL_READINGS, DECODE_READINGS, is_finished=True)
    assert phases == Phases(
        dispatch_s=0.5,
        queue_s=0.25,
        prefill_s=0.75,
        kv_reserve_s=0.0,
        kv_start_s=0.0,
        kv_transfer_s=0.25,
        batch_wait_s=0.125,
        decode_s=0.875,
        delivery_s=0.25,
    )
    assert sum_of(phases) == 3.0


def test_what_decode_keeps_a_request_waiting_for_is_told_apart():
    late = DECODE_READINGS | {LifetimeEvent.RESERVED: 1.125, LifetimeEvent.FIRST_FRAME: 1.1875}
    phases = Phases.of(0.5, 3.0, PREFILL_READINGS, late, is_finished=True)
    assert (phases.kv_reserve_s, phases.kv_start_s, phases.kv_transfer_s) == (0.125, 0.0625, 0.0625)
    assert sum_of(phases) == 3.0


def test_a_request_that_ends_with_its_first_token_has_no_phases_on_decode():
    phases = Phases.of(0.0, 1.5, PREFILL_READINGS, {}, is_finished=True)
    assert phases == Phases(dispatch_s=0.0, queue_s=0.25, prefill_s=0.75, delivery_s=0.5)


def test_what_earlier_attempts_took_is_a_phase_of_its_own():
    once = Phases.of(0.5, 3.0, PREFILL_READINGS, DECODE_READINGS, is_finished=True)
    twice = Phases.of(0.5, 10.0, PREFILL_READINGS, DECODE_READINGS, is_finished=True, retry_s=7.0)
    assert once.retry_s is None
    assert asdict(twice) == asdict(once) | {"retry_s": 7.0}
    assert sum_of(twice) == 10.0


def test_behind_a_missing_reading_nothing_is_known():
    decode = {event: at for event, at in DECODE_READINGS.items() if event is not LifetimeEvent.SPLICED}
    phases = Phases.of(0.0, 3.0, PREFILL_READINGS, decode, is_finished=True)
    assert phases == Phases(dispatch_s=0.0, queue_s=0.25, prefill_s=0.75, kv_reserve_s=0.0, kv_start_s=0.0)
    assert Phases.of(0.5, 3.0, {}, DECODE_READINGS, is_finished=True) == Phases(dispatch_s=0.5)


LOCAL_READINGS = {
    LifetimeEvent.RECEIVED: 0.0,
    LifetimeEvent.RESERVED: 0.125,
    LifetimeEvent.RUNNING: 0.25,
    LifetimeEvent.FIRST_TOKEN: 1.0,
    LifetimeEvent.ENDED: 2.25,
}


def test_what_decode_computes_alone_has_phases_by_its_own_readings():
    phases = Phases.of(0.5, 3.0, None, LOCAL_READINGS, is_finished=True)
    assert phases == Phases(dispatch_s=0.5, queue_s=0.25, prefill_s=0.75, decode_s=1.25, delivery_s=0.25)
    assert sum_of(phases) == 3.0
    again = Phases.of(0.5, 10.0, None, LOCAL_READINGS, is_finished=True, retry_s=7.0)
    assert asdict(again) == asdict(phases) | {"retry_s": 7.0}


def test_a_local_request_that_is_cut_short_has_the_phases_that_are_known():
    readings = {event: LOCAL_READINGS[event] for event in (LifetimeEvent.RECEIVED, LifetimeEvent.RUNNING)}
    assert Phases.of(0.0, 3.0, None, readings, is_finished=False) == Phases(dispatch_s=0.0, queue_s=0.25)
    assert Phases.of(0.0, 3.0, None, {}, is_finished=False) == Phases(dispatch_s=0.0)


MOMENTS = st.floats(0, 100)


@given(sent=MOMENTS, retry=MOMENTS, life=MOMENTS, readings=st.tuples(*[MOMENTS] * 3))
def test_local_phases_add_up_too(sent, retry, life, readings):
    events = (LifetimeEvent.RUNNING, LifetimeEvent.FIRST_TOKEN, LifetimeEvent.ENDED)
    end = sent + retry + life
    phases = Phases.of(sent, end, None, dict(zip(events, readings, strict=True)), is_finished=True, retry_s=retry)
    assert min(seconds for seconds in asdict(phases).values() if seconds is not None) >= 0.0
    assert sum_of(phases) == pytest.approx(end)


@given(sent=MOMENTS, retry=MOMENTS, life=MOMENTS, prefill=st.tuples(MOMENTS, MOMENTS), decode=st.tuples(*[MOMENTS] * 5))
def test_phases_add_up_whatever_two_clocks_say(sent, retry, life, prefill, decode):
    """Also where the readings of one worker are beyond those of the other, or beyond the end."""
    first = dict(zip(list(PREFILL_READINGS)[1:], prefill, strict=True))
    second = dict(zip(list(DECODE_READINGS)[1:], decode, strict=True))
    end = sent + retry + life
    phases = Phases.of(sent, end, first, second, is_finished=True, retry_s=retry)
    assert None not in asdict(phases).values()
    assert min(asdict(phases).values()) >= 0.0
    assert sum_of(phases) == pytest.approx(end)


def test_each_phase_is_a_histogram_and_one_that_is_not_known_is_not_counted():
    metrics = Metrics()
    for decode in (DECODE_READINGS, {}):
        phases = Phases.of(0.5, 3.0, PREFILL_READINGS, decode, is_finished=True)
        metrics.on_request_end(RequestOutcome("r", EndReason.STOP, None, phases))
    values = values_of(metrics)
    names = [f"kvsplice:request_{field.name.removesuffix('_s')}_time_seconds" for field in fields(Phases)]
    assert sum(values[f"{name}_sum"] for name in names) == 6.0
    assert values["kvsplice:request_queue_time_seconds_sum"] == 0.5
    assert values["kvsplice:request_kv_transfer_time_seconds_count"] == 1
    assert values["kvsplice:request_delivery_time_seconds_count"] == 2
