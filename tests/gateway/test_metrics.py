"""What /metrics counts."""

from dataclasses import replace

import pytest

from gateway.backend import RequestFailedError, TokenDelta
from gateway.failover import RetryReason
from gateway.metrics import Metrics, RequestTimer
from gateway.observer import KvHandover, Phases, RequestOutcome
from gateway.worker import Worker
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.messages import Hello
from kvtransfer.request_parts import EndReason, LifetimeEvent
from kvtransfer.worker_facts import Fingerprint, KvLayout, KvTraffic, Limits, Load, Role, SwapLoad
from tests.gateway.http_world import ids_of, make_world, saying


def values_of(metrics):
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_times_of_one_choice():
    clock = Clock()
    metrics = Metrics(clock)
    timer = RequestTimer(metrics, started_at=99.0, num_prompt_tokens=7)
    timer.on_tokens(0)
    clock.now = 101.0
    timer.on_tokens(1)
    for gap in (0.25, 0.5):
        clock.now += gap
        timer.on_tokens(1)
    timer.end("stop")
    values = values_of(metrics)
    assert values["kvsplice:time_to_first_token_seconds_sum"] == 2.0
    assert values["kvsplice:inter_token_latency_seconds_count"] == 2
    assert values["kvsplice:inter_token_latency_seconds_sum"] == 0.75
    assert values["kvsplice:request_time_per_output_token_seconds_sum"] == 0.375
    assert values["kvsplice:e2e_request_latency_seconds_sum"] == 2.75
    assert values["kvsplice:prompt_tokens_total"] == 7
    assert values["kvsplice:generation_tokens_total"] == 3


def test_one_token_has_no_time_per_output_token():
    metrics = Metrics(Clock())
    timer = RequestTimer(metrics, started_at=99.0, num_prompt_tokens=7)
    timer.on_tokens(1)
    timer.end("length")
    assert values_of(metrics)["kvsplice:request_time_per_output_token_seconds_count"] == 0
    assert values_of(metrics)["kvsplice:e2e_request_latency_seconds_count"] == 1


def test_a_prompt_without_any_output_is_counted():
    world = make_world()
    world.complete(prompt=[5, 6, 7], echo=True, max_tokens=0)
    values = values_of(world.metrics)
    assert (values["kvsplice:prompt_tokens_total"], values["kvsplice:generation_tokens_total"]) == (3, 0)
    assert values["kvsplice:time_to_first_token_seconds_count"] == 0


def test_requests_are_counted_by_their_end():
    world = make_world()
    world.complete(prompt=["a", "b"])
    world.backend.script = lambda *_: saying("zq", EndReason.LENGTH)
    world.complete(stream=True)
    world.backend.script = lambda *_: [TokenDelta(ids_of("z"), None), RequestFailedError("lost")]
    world.complete()
    values = values_of(world.metrics)
    counts = {
        r: values[f'kvsplice:request_success_total{{finished_reason="{r}"}}'] for r in ("stop", "length", "error")
    }
    assert counts == {"stop": 2, "length": 1, "error": 1}
    assert values["kvsplice:e2e_request_latency_seconds_count"] == 3
    assert values["kvsplice:time_to_first_token_seconds_count"] == 4
    assert values["kvsplice:generation_tokens_total"] == 2 * (len(ids_of("hello world")) + 1) + 2 + 1


def test_retries_are_counted_by_reason_and_a_hand_off_has_its_gap():
    metrics = Metrics()
    for reason in (RetryReason.DECODE_LOST, RetryReason.DECODE_LOST, RetryReason.OVERLOADED):
        metrics.on_retry(reason)
    for gap in (0.25, None):
        metrics.on_request_end(RequestOutcome("r", EndReason.LENGTH, None, Phases(dispatch_s=0.0), gap))
    values = values_of(metrics)
    name = "kvsplice:request_retries_total"
    assert {key: value for key, value in values.items() if key.startswith(name)} == {
        f'{name}{{reason="prefill_lost"}}': 0,
        f'{name}{{reason="decode_lost"}}': 2,
        f'{name}{{reason="worker_stopped"}}': 0,
        f'{name}{{reason="role_switched"}}': 0,
        f'{name}{{reason="failed"}}': 0,
        f'{name}{{reason="overloaded"}}': 1,
    }
    assert values["kvsplice:handoff_gap_seconds_count"] == 1
    assert values["kvsplice:handoff_gap_seconds_sum"] == 0.25


def test_two_gateways_in_one_process_do_not_share_counts():
    world, other = make_world(), make_world()
    world.complete()
    assert values_of(other.metrics)["kvsplice:generation_tokens_total"] == 0


def test_the_endpoint_speaks_prometheus():
    response = make_world().ask("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE kvsplice:time_to_first_token_seconds histogram" in response.text
    assert 'kvsplice:request_success_total{finished_reason="abort"} 0.0' in response.text


def worker_of(role, worker_id, load):
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        role=role,
        worker_id=worker_id,
        generation="g",
        fingerprint=Fingerprint("a", "b", "c", "float32", 320),
        layout=KvLayout(1, 1, 8, "float32", 16),
        limits=Limits(100, 4, 1000),
        kv_endpoint=None,
    )
    return Worker(hello=hello, link=f"{worker_id}/g/n", heard_at=0.0, progress_at=0.0, load=load)


def test_there_are_no_series_that_only_say_when_others_began():
    names = values_of(Metrics())
    assert 'kvsplice:request_success_total{finished_reason="stop"}' in names
    assert [name for name in names if "_created" in name] == []


def test_workers_are_read_when_metrics_are():
    metrics, workers, capable = Metrics(), [], {"d0"}
    metrics.watch_workers(lambda: workers, lambda: capable)
    workers.append(worker_of(Role.DECODE, "d0", Load(3, 2, 0.25, 75, 100)))
    labels = '{role="decode",worker="d0"}'
    values = values_of(metrics)
    assert values["kvsplice:worker_capable" + labels] == 1
    assert values["kvsplice:num_requests_running" + labels] == 3
    assert values["kvsplice:num_requests_waiting" + labels] == 2
    assert values["kvsplice:kv_cache_usage_perc" + labels] == 0.25
    assert values["kvsplice:kv_blocks" + labels] == 100
    assert values["kvsplice:kv_free_blocks" + labels] == 75
    workers[0] = replace(workers[0], load=Load(0, 0, 0.0))
    capable.clear()
    assert values_of(metrics)["kvsplice:num_requests_running" + labels] == 0
    assert values_of(metrics)["kvsplice:worker_capable" + labels] == 0
    workers.clear()
    assert "kvsplice:num_requests_running" + labels not in values_of(metrics)


def test_what_memory_holds_and_what_came_of_it_is_read_by_worker():
    load = Load(
        num_running=1,
        num_waiting=0,
        kv_usage=0.5,
        num_blocks=8,
        num_free_blocks=4,
        kv_waste=0.03,
        num_preemptions=5,
        prefix_queries=60,
        prefix_hits=40,
        prefix_evictions=6,
        swap=SwapLoad(num_blocks=9, num_free=7, num_out=11, num_in=10, num_refused=2),
    )
    metrics = Metrics()
    metrics.watch_workers(lambda: [worker_of(Role.DECODE, "d0", load)], lambda: ())
    values, labels = values_of(metrics), '{role="decode",worker="d0"}'
    assert {name: values[f"kvsplice:{name}{labels}"] for name in MEMORY_METRICS} == MEMORY_METRICS


MEMORY_METRICS = {
    "kv_cache_usage_perc": 0.5,
    "kv_blocks": 8,
    "kv_free_blocks": 4,
    "kv_waste_perc": 0.03,
    "num_preemptions_total": 5,
    "prefix_cache_queries_total": 60,
    "prefix_cache_hits_total": 40,
    "prefix_cache_evictions_total": 6,
    "swap_blocks": 9,
    "swap_free_blocks": 7,
    "swapped_out_blocks_total": 11,
    "swapped_in_blocks_total": 10,
    "swap_refusals_total": 2,
}


def test_what_became_of_kv_is_counted_by_worker():
    metrics = Metrics()
    traffic = KvTraffic(num_bytes=1 << 40, num_resent_bytes=2, num_late=3, num_stale=4, num_corrupt=5, num_resends=6)
    metrics.watch_workers(lambda: [worker_of(Role.DECODE, "d0", Load(0, 0, 0.0, kv_traffic=traffic))], lambda: ())
    values, labels = values_of(metrics), '{role="decode",worker="d0"}'
    assert values["kvsplice:kv_transfer_bytes_total" + labels] == 1 << 40
    names = ("kv_resent_bytes", "kv_late_messages", "kv_stale_frames", "kv_corrupt_frames", "kv_resends")
    assert [values[f"kvsplice:{name}_total{labels}"] for name in names] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("readings", "transfer", "exposed"),
    [
        ({LifetimeEvent.KV_STARTED: 0.25, LifetimeEvent.KV_READY: 1.0, LifetimeEvent.KV_TAKEN: 1.5}, 1.25, 0.5),
        ({LifetimeEvent.KV_STARTED: 1.25, LifetimeEvent.KV_READY: 1.0, LifetimeEvent.KV_TAKEN: 1.5}, 0.25, 0.5),
        ({LifetimeEvent.KV_READY: 1.0, LifetimeEvent.KV_TAKEN: 1.5}, None, 0.5),
        ({LifetimeEvent.ENDED: 1.0}, None, None),
        ({}, None, None),
    ],
    ids=["hidden", "decode was late", "nothing to send", "an older worker", "nothing"],
)
def test_the_time_of_a_handover_is_counted_where_it_is_known(readings, transfer, exposed):
    metrics = Metrics()
    metrics.on_handover(KvHandover.of(readings))
    values = values_of(metrics)
    for name, seconds in (("kv_transfer_seconds", transfer), ("kv_transfer_exposed_seconds", exposed)):
        assert values[f"kvsplice:{name}_count"] == (seconds is not None)
        assert values[f"kvsplice:{name}_sum"] == (seconds or 0.0)


def test_counts_that_others_keep_are_read_when_metrics_are():
    metrics, counts = Metrics(), [3]
    metrics.watch_count("late_outputs", "Late ones.", lambda: counts[0])
    assert values_of(metrics)["kvsplice:late_outputs_total"] == 3
    counts[0] = 4
    assert values_of(metrics)["kvsplice:late_outputs_total"] == 4


def test_answers_with_an_error_are_counted_by_class_whoever_gives_them():
    world = make_world(max_body_bytes=1024, api_key="key")
    named = {"headers": {"Authorization": "Bearer key"}}
    world.complete()  # 401, before anything
    world.post("/v1/completions", {"prompt": "x" * 2000}, **named)  # 413, before the body
    world.post("/v1/completions", {"surprise": 1}, **named)  # 400
    world.ask("GET", "/nothing", **named)  # 404
    world.ask("GET", "/health")
    world.backend.reasons = ("no decode worker can take requests",)
    world.ask("GET", "/health")  # 503
    values = values_of(world.metrics)
    counts = {key: value for key, value in values.items() if key.startswith("kvsplice:http_errors_total")}
    assert counts == {
        'kvsplice:http_errors_total{status_class="4xx"}': 4,
        'kvsplice:http_errors_total{status_class="5xx"}': 1,
    }
