"""What /metrics shows: vLLM's names behind our own prefix, in a registry of its own.

Times are seconds. Requests are counted once a choice; a beam search is one, with a token a step. TTFT counts from the
arrival of the call, so tokenising and queueing are in it; ITL is the gap between two outputs of the workers, which hold
one token each unless the gateway was behind.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.failover import RetryReason
from gateway.modes import Mode
from gateway.observer import KvHandover, Phases, RequestOutcome
from gateway.worker import Worker

PREFIX: Final = "kvsplice:"
FINISHED_REASONS: Final = ("stop", "length", "abort", "error")
ERROR_CLASSES: Final = ("4xx", "5xx")

_SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LONG_S: Final = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 600.0)
_ANY_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, *_LONG_S)

_PHASES: Final = {
    "dispatch_s": ("request_dispatch_time_seconds", "Arrival to dispatch: checks, chat template, tokenising."),
    "retry_s": (
        "request_retry_time_seconds",
        "First dispatch to the last one, of requests that were dispatched more than once.",
    ),
    "queue_s": ("request_queue_time_seconds", "The last dispatch to the first chunk of the prompt."),
    "prefill_s": ("request_prefill_time_seconds", "First chunk to first token."),
    "kv_reserve_s": (
        "request_kv_reserve_time_seconds",
        "First token to reserved blocks on decode; 0 if these came first.",
    ),
    "kv_start_s": (
        "request_kv_start_time_seconds",
        "From there to the first KV frame on decode; 0 if it came before the first token.",
    ),
    "kv_transfer_s": ("request_kv_transfer_time_seconds", "From there to the last of the KV."),
    "batch_wait_s": ("request_batch_wait_time_seconds", "From there to the first decode step."),
    "decode_s": (
        "request_decode_time_seconds",
        "First decode step (of a local request: first token) to the end on decode.",
    ),
    "delivery_s": ("request_delivery_time_seconds", "From there to the last token at the gateway."),
}
"""Of the fields of `gateway.observer.Phases`, in order: name and text."""

_HANDOVERS: Final = {
    "transfer_s": ("kv_transfer_seconds", "First KV frame on its way to decode's word that it has everything."),
    "exposed_s": ("kv_transfer_exposed_seconds", "All KV computed to decode's word that it has everything."),
}
"""Of the fields of `gateway.observer.KvHandover`."""

_TRAFFIC: Final = {
    "kv_transfer_bytes": ("num_bytes", "KV bytes: sent, repeats included, by prefill; spliced by decode."),
    "kv_resent_bytes": ("num_resent_bytes", "KV bytes that prefill was asked for again."),
    "kv_resends": ("num_resends", "Times decode asked for KV again."),
    "kv_corrupt_frames": ("num_corrupt", "KV frames on decode whose checksum did not fit."),
    "kv_stale_frames": ("num_stale", "KV frames on decode behind one that was lost or damaged."),
    "kv_late_messages": ("num_late", "Messages on decode about KV that nobody waited for any more."),
}
"""Fields of a worker's `KvTraffic`, counted since its start."""


class Metrics:
    """All metrics of the gateway. Also a `gateway.observer.DispatchObserver`. Lives on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _LONG_S)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Gap between outputs.", _SHORT_S)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1) of a finished request.", _SHORT_S
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LONG_S)
        self._phases = self._time_histograms(_PHASES)
        self._handoff_gap = self._histogram(
            "handoff_gap_seconds", "Gap between prefill's token and decode's first, at the gateway.", _SHORT_S
        )
        self._retries = self._counter_by(
            "reason",
            [reason.value for reason in RetryReason],
            "request_retries",
            "Further attempts of requests, by what ended the one before.",
        )
        self._handovers = self._time_histograms(_HANDOVERS)
        self._modes = self._counter_by(
            "mode",
            [mode.value for mode in (Mode.DISAGGREGATED, Mode.LOCAL)],
            "request_mode",
            "Dispatched requests by where the prompt of their last attempt was computed.",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests with a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens.")
        self.requests = self._counter_by(
            "finished_reason", FINISHED_REASONS, "request_success", "Ended requests by reason."
        )
        self._http_errors = self._counter_by(
            "status_class", ERROR_CLASSES, "http_errors", "HTTP answers with an error status."
        )

    def watch_workers(
        self, read_live: Callable[[], Sequence[Worker]], read_capable: Callable[[], Collection[str]]
    ) -> None:
        """Whenever metrics are read, these give the live workers and the ids of those that can take requests; a worker
        that has gone leaves no value behind."""
        self._registry.register(WorkerCollector(read_live, read_capable))

    def watch_count(self, name: str, text: str, read: Callable[[], int]) -> None:
        """`read` gives a count that somebody else keeps, whenever metrics are read."""
        self._registry.register(CountCollector(name, text, read))

    def render(self) -> bytes:
        """Prometheus' text format."""
        visible = CollectorRegistry()
        visible.register(WithoutCreated(self._registry))
        return generate_latest(visible)

    def count_http_answer(self, status: int) -> None:
        """Any answer, whether it came to a request on the workers or not."""
        if status >= 400:
            self._http_errors.labels("4xx" if status < 500 else "5xx").inc()

    def on_request_end(self, outcome: RequestOutcome) -> None:
        """Where a dispatched request went, and its time."""
        self._modes.labels(outcome.mode.value).inc()
        _observe_known(self._phases, outcome.phases)
        if outcome.handoff_gap_s is not None:
            self._handoff_gap.observe(outcome.handoff_gap_s)

    def on_retry(self, reason: RetryReason) -> None:
        """A request that had lost an attempt has got another one."""
        self._retries.labels(reason.value).inc()

    def on_handover(self, handover: KvHandover) -> None:
        """How long a hand-over took, and how much of that could not be hidden."""
        _observe_known(self._handovers, handover)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

    def _time_histograms(self, table: Mapping[str, tuple[str, str]]) -> dict[str, Histogram]:
        """By field: table values are names and texts."""
        return {field: self._histogram(name, text, _ANY_S) for field, (name, text) in table.items()}

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def _counter_by(self, label: str, values: Iterable[str], name: str, text: str) -> Counter:
        """One with a label, which shows 0 for each of these values from the start."""
        counter = Counter(PREFIX + name, text, (label,), registry=self._registry)
        for value in values:
            counter.labels(value)
        return counter


class WorkerCollector(Collector):
    """Gauges of the live workers, by role and id."""

    def __init__(self, read_live: Callable[[], Sequence[Worker]], read_capable: Callable[[], Collection[str]]) -> None:
        self._read_live = read_live
        self._read_capable = read_capable

    def collect(self) -> Iterable[Metric]:
        workers, capable = self._read_live(), self._read_capable()
        yield _gauge("worker_capable", "1 if it takes requests.", workers, lambda w: w.worker_id in capable)
        yield _gauge("num_requests_running", "Requests that hold KV blocks.", workers, lambda w: w.load.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait for blocks.", workers, lambda w: w.load.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Used part of the KV pool, 0 to 1.", workers, lambda w: w.load.kv_usage)
        yield _gauge("kv_blocks", "Blocks of the KV pool.", workers, lambda w: w.load.num_blocks)
        yield _gauge("kv_free_blocks", "Free blocks of the KV pool.", workers, lambda w: w.load.num_free_blocks)
        yield _gauge("kv_waste_perc", "Part of used blocks that holds no token.", workers, lambda w: w.load.kv_waste)
        yield _gauge("swap_blocks", "KV blocks of the host's memory.", workers, lambda w: w.load.swap.num_blocks)
        yield _gauge("swap_free_blocks", "Free ones of these.", workers, lambda w: w.load.swap.num_free)
        for name, text, value in _WORKER_COUNTS:
            yield _count(name, text, workers, value)
        for name, (field, text) in _TRAFFIC.items():
            yield _count(name, text, workers, partial(_traffic, field=field))


_WORKER_COUNTS: Final[tuple[tuple[str, str, Callable[[Worker], int]], ...]] = (
    ("num_preemptions", "Requests that lost their blocks to others.", lambda w: w.load.num_preemptions),
    ("swapped_out_blocks", "KV blocks that went to the host's memory.", lambda w: w.load.swap.num_out),
    ("swapped_in_blocks", "KV blocks that came back from there.", lambda w: w.load.swap.num_in),
    ("swap_refusals", "Preemptions without room there: computed again.", lambda w: w.load.swap.num_refused),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda w: w.load.prefix_queries),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda w: w.load.prefix_hits),
    ("prefix_cache_evictions", "Blocks whose contents made room.", lambda w: w.load.prefix_evictions),
)


class WithoutCreated(Collector):
    """All that a registry has but the `_created` series, which say when a series began: nobody asks, and they are as
    many as the series that count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class CountCollector(Collector):
    """One counter without labels that is kept elsewhere."""

    def __init__(self, name: str, text: str, read: Callable[[], int]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(PREFIX + self._name, self._text, value=self._read())


class RequestTimer:
    """The clock readings of one choice, and what they add to the metrics. `started_at` is on the metrics' clock."""

    def __init__(self, metrics: Metrics, started_at: float, num_prompt_tokens: int) -> None:
        self.started_at = started_at
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._first_at: float | None = None
        self._last_at = started_at

    def on_tokens(self, num_tokens: int) -> None:
        """So many tokens have come at once, 0 for none."""
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._first_at is None:
            self._first_at = now
            self._metrics.time_to_first_token.observe(now - self.started_at)
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        else:
            self._metrics.inter_token_latency.observe(now - self._last_at)
        self._last_at = now
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def end(self, reason: str) -> None:
        """Once, with one of FINISHED_REASONS. Only requests that finished have a latency."""
        assert reason in FINISHED_REASONS, f"not a reason to end: {reason!r}"
        self._metrics.requests.labels(reason).inc()
        if reason not in ("stop", "length"):
            return
        if self._first_at is None:  # nothing but the prompt was asked for
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        self._metrics.e2e_latency.observe(self._metrics.clock() - self.started_at)
        if self._num_tokens > 1 and self._first_at is not None:
            per_token = (self._last_at - self._first_at) / (self._num_tokens - 1)
            self._metrics.time_per_output_token.observe(per_token)


def _observe_known(histograms: Mapping[str, Histogram], times: Phases | KvHandover) -> None:
    """Each field goes to its histogram, where it is known."""
    for field, histogram in histograms.items():
        seconds = getattr(times, field)
        if seconds is not None:
            histogram.observe(seconds)


def _gauge(name: str, text: str, workers: Sequence[Worker], value: Callable[[Worker], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, text, labels=("role", "worker"))
    for worker in workers:
        family.add_metric((worker.role.value, worker.worker_id), value(worker))
    return family


def _count(name: str, text: str, workers: Sequence[Worker], value: Callable[[Worker], int]) -> CounterMetricFamily:
    """A worker's own count, which begins anew when it is restarted."""
    family = CounterMetricFamily(PREFIX + name, text, labels=("role", "worker"))
    for worker in workers:
        family.add_metric((worker.role.value, worker.worker_id), value(worker))
    return family


def _traffic(worker: Worker, field: str) -> int:
    count: int = getattr(worker.load.kv_traffic, field)
    return count
