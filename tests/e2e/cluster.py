"""A gateway with its workers as real processes on free loopback ports, ready when entered, gone when left."""

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.processes import RoleProcess, wait_until

READY_WITHIN_S = 60.0
MODEL_NAME = "test-model"
GATEWAY, PREFILL, DECODE = "gateway", "prefill", "decode"
ROLES = (GATEWAY, PREFILL, DECODE)


@dataclass(frozen=True)
class ClusterFlags:
    """What the processes are started with, beside addresses and names. `workers` go to prefill and decode both."""

    model: Path
    workers: Sequence[str] = ("--dtype", "float32", "--kv-cache-gib", "0.5")
    gateway: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()


def samples(http: httpx.Client, name: str, **labels: str) -> list[float]:
    """The samples of /metrics that have these labels. `name` is without the prefix."""
    return [
        float(sample.value)
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == f"kvsplice:{name}" and labels.items() <= sample.labels.items()
    ]


class Cluster:
    """The processes, one a role, and what the gateway says of them on /health and /metrics."""

    def __init__(self, flags: ClusterFlags, folder: Path) -> None:
        self._flags = flags
        self._folder = folder
        self._port, self._control_port = free_ports(2)
        self._processes: dict[str, RoleProcess] = {}
        self._ended: list[RoleProcess] = []
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __getitem__(self, role: str) -> RoleProcess:
        return self._processes[role]

    # --- processes

    def start(self, role: str, *more_flags: str) -> RoleProcess:
        """Starts a role that does not run; `more_flags` come last and win."""
        log = self._folder / f"{role}-{len(self._ended)}.log"
        process = RoleProcess(role, role, [*self._flags_of(role), *more_flags], log)
        self._processes[role] = process
        return process

    def start_all(self, order: Sequence[str] = ROLES) -> None:
        for role in order:
            self.start(role)

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal; after SIGKILL the process is really gone."""
        self[role].send(number)
        if number is signal.SIGKILL:
            assert self[role].wait(5.0) == -signal.SIGKILL
            self.retire(role)

    def stop(self, role: str) -> None:
        """SIGTERM to one role; fails unless it ends well and in time."""
        self[role].stop()
        self.retire(role)

    def restart(self, role: str) -> None:
        """A new process in the place of one that has ended."""
        assert role not in self._processes, f"{role} still runs"
        self.start(role)

    def stop_all(self) -> None:
        """Stops all roles at once, whatever happens to single ones; the first failure is raised at the end."""
        failures: list[AssertionError] = []
        for process in self._processes.values():
            process.terminate()
        for role in list(self._processes):
            try:
                self.stop(role)
            except AssertionError as error:
                failures.append(error)
                self[role].kill()
        self.http.close()
        if failures:
            raise failures[0]

    def logs(self) -> str:
        return "\n".join(process.tail() for process in [*self._ended, *self._processes.values()])

    def retire(self, role: str) -> None:
        """Forgets a process that has ended, but for its log."""
        assert self[role].exit_code is not None, f"{role} still runs"
        self._ended.append(self._processes.pop(role))

    def _flags_of(self, role: str) -> list[str]:
        control = f"127.0.0.1:{self._control_port}"
        if role == GATEWAY:
            ports = ["--port", str(self._port), "--control-port", str(self._control_port)]
            # Short prompts too go the whole way, unless a test says otherwise.
            mode = ["--default-mode", "disaggregated"]
            own = [*ports, "--served-model-name", MODEL_NAME, *mode, *self._flags.gateway]
        else:
            shared = ["--gateway", f"tcp://{control}", "--worker-id", f"{role}-0", *self._flags.workers]
            own = [*shared, *(self._flags.prefill if role == PREFILL else self._flags.decode)]
        return ["--model", str(self._flags.model), *own]

    # --- health and metrics

    def health(self) -> httpx.Response | None:
        """The answer of /health, or None while nobody listens."""
        try:
            return self.http.get("/health", timeout=5.0)
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        response = self.health()
        return response is not None and response.status_code == 200

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Seconds until /health says ready; fails at once if a process ends meanwhile."""

        def ready() -> bool:
            for process in self._processes.values():
                assert process.exit_code is None, f"{process.name} ended with {process.exit_code}\n{process.tail()}"
            return self.is_ready()

        return wait_until(ready, within_s=within_s, what="the cluster is ready")

    def gauge(self, name: str, **labels: str) -> float | None:
        """A sample of /metrics that has these labels, None if there is none. `name` is without the prefix."""
        return next(iter(samples(self.http, name, **labels)), None)

    def kv_usage(self, role: str) -> float | None:
        """Used part of the KV pool of a role's worker, by its last heartbeat; None while the gateway lacks it."""
        return self.gauge("kv_cache_usage_perc", role=role, worker=f"{role}-0")

    def pools_are_empty(self) -> bool:
        """Whether both workers are there and hold neither blocks nor requests, by their last heartbeats."""
        held = [
            self.gauge(name, role=role, worker=f"{role}-0")
            for role in (PREFILL, DECODE)
            for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        ]
        return held == [0.0] * len(held)

    def holds_blocks(self, role: str) -> bool:
        """Whether the role's worker has blocks in use, by its last heartbeat."""
        return (self.kv_usage(role) or 0.0) > 0.0

    def wait_pools_empty(self, within_s: float = 5.0) -> None:
        wait_until(self.pools_are_empty, within_s=within_s, what="both pools are empty")


def assert_unavailable(cluster: Cluster, *, missing: str, present: str) -> None:
    """Both /health and a call say 503, and which role is missing."""
    health = cluster.health()
    assert health is not None
    assert health.status_code == 503
    assert missing in health.text
    assert present not in health.text
    response = cluster.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": [10, 11]})
    assert response.status_code == 503
    assert missing in response.json()["error"]["message"]


@contextmanager
def running_cluster(flags: ClusterFlags, folder: Path) -> Iterator[Cluster]:
    """All three roles, ready. At the end each must go by itself; the logs are shown if anything failed."""
    cluster = Cluster(flags, folder)
    try:
        cluster.start_all()
        cluster.wait_ready()
        yield cluster
    except BaseException:
        with suppress(AssertionError):  # what has failed first says more
            cluster.stop_all()
        raise
    else:
        cluster.stop_all()
    finally:
        print(cluster.logs())  # pytest shows it for failed tests only


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held until the last is found, so they differ."""
    holders = [socket.socket() for _ in range(count)]
    try:
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [holder.getsockname()[1] for holder in holders]
    finally:
        for holder in holders:
            holder.close()
