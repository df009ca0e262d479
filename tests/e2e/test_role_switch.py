"""Workers that change their roles under load, as real processes: no stream is lost, no token differs, nothing leaks.

Float32, so that computing a token's KV in a prompt instead of in steps changes no token.
"""

import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from launcher.keys import make_keys
from tests.e2e.client import body_of, complete, stream
from tests.e2e.cluster import MODEL_NAME, READY_WITHIN_S, free_ports, samples
from tests.e2e.conftest import PATIENT_GATEWAY, TINY_WORKERS
from tests.e2e.load import Call, Outcome, OutcomeKind, play, random_call, solo_answers
from tests.e2e.processes import EXIT_WITHIN_S, RoleProcess, wait_until
from tests.e2e.streaming import PROMPT, Streaming

PREFILL, DECODE = "prefill", "decode"
SWITCHED_WITHIN_S = 30.0
LONG_PROMPT = [10 + i % 200 for i in range(3000)]
STORY = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.8, "seed": 11}


class Switchable:
    """One or two gateways with admin calls, and workers of `kvsplice worker` called worker-0, worker-1, ..."""

    def __init__(self, model: Path, folder: Path, *, gateway=(), worker=(), num_gateways: int = 1) -> None:
        self._folder, self._model, self._worker_flags = folder, model, worker
        ports = free_ports(2 * num_gateways)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:num_gateways]]
        self.controls = [f"tcp://127.0.0.1:{port}" for port in ports[num_gateways:]]
        self.http = httpx.Client(base_url=self.urls[0], timeout=120.0)
        self._all: list[RoleProcess] = []
        self.gateways = [
            self._start("gateway", "gateway", "--served-model-name", MODEL_NAME, *self._ports(ports, number), *gateway)
            for number in range(num_gateways)
        ]
        self.workers: dict[str, RoleProcess] = {}

    @staticmethod
    def _ports(ports, number) -> list[str]:
        http, control = ports[number], ports[len(ports) // 2 + number]
        return ["--port", str(http), "--control-port", str(control), "--enable-admin", *PATIENT_GATEWAY]

    def _start(self, module: str, name: str, *flags: str) -> RoleProcess:
        log = self._folder / f"{name}-{len(self._all)}.log"
        process = RoleProcess(name, module, [*flags, "--model", str(self._model)], log)
        self._all.append(process)
        return process

    def start(self, worker_id: str, role: str, *more: str) -> RoleProcess:
        addresses = [part for control in self.controls for part in ("--gateway", control)]
        own = ["--worker-id", worker_id, "--role", role, *addresses, *TINY_WORKERS, *self._worker_flags, *more]
        self.workers[worker_id] = self._start("launcher", worker_id, "worker", *own)
        return self.workers[worker_id]

    def listed(self, gateway: int = 0) -> dict[str, dict]:
        """The workers as a gateway lists them; none while it does not answer."""
        try:
            response = self.http.get(f"{self.urls[gateway]}/admin/workers", timeout=5.0)
        except httpx.TransportError:
            return {}
        return {item["id"]: item for item in response.json()["workers"]}

    def has(self, worker_id: str, role: str, gateway: int = 0) -> bool:
        item = self.listed(gateway).get(worker_id, {})
        return (item.get("role"), item.get("state")) == (role, "ready")

    def wait(self, worker_id: str, role: str, within_s: float = SWITCHED_WITHIN_S) -> None:
        for number in range(len(self.urls)):
            wait_until(lambda n=number: self.has(worker_id, role, n), within_s=within_s, what=f"{worker_id} is {role}")

    def order(self, worker_id: str, role: str, **fields) -> httpx.Response:
        return self.http.post(f"/admin/workers/{worker_id}/role", json={"role": role, **fields})

    def switch(self, worker_id: str, role: str, **fields) -> None:
        response = self.order(worker_id, role, **fields)
        assert (response.status_code, response.json()["switching_to"]) == (202, role), response.text
        self.wait(worker_id, role)

    def num_retries(self) -> float:
        """Attempts of requests that were followed by another one: what a hand-over leaves, however fast the stream."""
        return sum(samples(self.http, "request_retries_total"))

    def pools_are_empty(self) -> bool:
        held = [(item["kv_usage"], item["num_running"], item["num_waiting"]) for item in self.listed().values()]
        return len(held) == len(self.workers) and set(held) == {(0.0, 0, 0)}

    def wait_empty(self) -> None:
        wait_until(self.pools_are_empty, within_s=10.0, what="all pools are empty")

    def busy(self) -> str:
        """The worker that runs the one request that there is, once its beats say so."""

        def running() -> list[str]:
            return [worker_id for worker_id, item in self.listed().items() if item["num_running"]]

        wait_until(running, within_s=10.0, what="a worker is busy")
        (worker_id,) = running()
        return worker_id

    def stop(self) -> None:
        self.http.close()
        for process in self._all:
            process.terminate()
        failures = []
        for process in self._all:
            try:
                if process.exit_code != -signal.SIGKILL:
                    process.stop()
            except AssertionError as error:
                failures.append(error)
                process.kill()
        if failures:
            raise failures[0]

    def logs(self) -> str:
        return "\n".join(process.tail() for process in self._all)


@contextmanager
def switchable(model, folder, roles=(PREFILL, DECODE), **flags) -> Iterator[Switchable]:
    """With these workers, ready. At the end each must go by itself."""
    made = Switchable(model, folder, **flags)
    try:
        for number, role in enumerate(roles):
            made.start(f"worker-{number}", role)
        for number, role in enumerate(roles):
            made.wait(f"worker-{number}", role, within_s=READY_WITHIN_S)
        yield made
    finally:
        print(made.logs())  # pytest shows it for failed tests only
        made.stop()


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    with switchable(tiny_model, tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture
def fresh(pair):
    """worker-0 prefills and worker-1 decodes, whatever the test before has left."""
    for worker_id, role in (("worker-0", PREFILL), ("worker-1", DECODE)):
        if not pair.has(worker_id, role):
            pair.switch(worker_id, role, force=True)
    yield pair
    pair.wait_empty()


class Load:
    """Calls without an end, each of `calls` in turn in each of a few threads, until left; all outcomes are kept."""

    def __init__(self, http: httpx.Client, calls: list[Call], answers: list[str], num_threads: int = 4) -> None:
        self._http, self._pairs = http, list(zip(calls, answers, strict=True))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_threads)]
        self.outcomes: list[Outcome] = []

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            call, answer = self._pairs[number % len(self._pairs)]
            self.outcomes.append(play(self._http, call, answer))
            number += len(self._threads)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a call has not ended"

    def wait_for_more(self, count: int) -> None:
        """Until so many further calls have ended."""
        enough = len(self.outcomes) + count
        wait_until(lambda: len(self.outcomes) >= enough, within_s=60.0, what=f"{count} more calls have ended")


# --- under load --------------------------------------------------------------------------------------


def test_roles_change_under_load_and_nobody_notices(fresh):
    rng = random.Random(3)
    calls = [random_call(rng, max_prompt=600, max_tokens=120) for _ in range(24)]
    answers = solo_answers(fresh.http, calls)
    pids = {worker_id: process.pid for worker_id, process in fresh.workers.items()}
    with Load(fresh.http, calls, answers) as load:
        load.wait_for_more(8)
        fresh.switch("worker-0", DECODE, force=True)  # two of decode, as colocated replicas
        load.wait_for_more(16)
        fresh.switch("worker-1", PREFILL)  # the roles are exchanged
        load.wait_for_more(16)
        fresh.switch("worker-1", DECODE, force=True)
        load.wait_for_more(8)
        fresh.switch("worker-0", PREFILL)
        load.wait_for_more(16)
    assert {outcome.kind for outcome in load.outcomes} == {OutcomeKind.RIGHT}, [
        outcome for outcome in load.outcomes if outcome.kind is not OutcomeKind.RIGHT
    ]
    assert {worker_id: process.pid for worker_id, process in fresh.workers.items()} == pids
    modes = {complete_in(fresh, mode) for mode in ("local", "disaggregated")}
    assert modes == {"local", "disaggregated"}, "all is as before"


def complete_in(cluster: Switchable, mode: str) -> str:
    header = "X-KVSplice-Mode"
    response = cluster.http.post("/v1/completions", json=body_of(LONG_PROMPT, max_tokens=4), headers={header: mode})
    assert response.status_code == 200, response.text
    return response.headers[header]


def test_what_does_not_end_in_time_goes_on_elsewhere(fresh):
    undisturbed = stream(fresh.http, PROMPT, **STORY)
    fresh.switch("worker-0", DECODE, force=True)
    fresh.wait_empty()
    before = fresh.num_retries()
    with Streaming(fresh, **STORY) as streaming:
        fresh.switch(fresh.busy(), PREFILL, timeout_s=0.1)
    assert fresh.num_retries() == before + 1
    assert (streaming.errors, streaming.num_done, streaming.was_cut) == ([], 1, False)
    assert streaming.text == undisturbed.text


def test_the_only_decode_worker_goes_by_force_and_its_stream_waits_for_the_way_back(fresh):
    undisturbed = stream(fresh.http, PROMPT, **STORY)
    with Streaming(fresh, **STORY) as streaming:
        refused = fresh.order("worker-1", PREFILL, timeout_s=0.1)
        assert (refused.status_code, "say force" in refused.text) == (409, True)
        fresh.switch("worker-1", PREFILL, timeout_s=0.1, force=True)
        assert fresh.http.get("/health").status_code == 503
        assert streaming.ended_at is None
        fresh.switch("worker-1", DECODE)
    assert (streaming.errors, streaming.text) == ([], undisturbed.text)


def test_a_draining_worker_says_so_finishes_and_can_not_be_told_again(fresh):
    fields = {**STORY, "max_tokens": 2000}
    undisturbed = stream(fresh.http, PROMPT, **fields)
    fresh.switch("worker-0", DECODE, force=True)
    fresh.wait_empty()
    with Streaming(fresh, **fields) as streaming:
        busy = fresh.busy()
        assert fresh.order(busy, PREFILL, timeout_s=100).status_code == 202
        assert fresh.order(busy, PREFILL, timeout_s=100).status_code == 409
        assert (fresh.listed()[busy]["state"], fresh.listed()[busy]["switching_to"]) == ("draining", PREFILL)
        assert complete(fresh.http, [30, 31], max_tokens=4, ignore_eos=True).num_tokens == 4, "others are served"
    fresh.wait(busy, PREFILL)
    assert (streaming.errors, streaming.text) == ([], undisturbed.text)


def test_nothing_is_left_behind_by_many_switches(fresh):
    """Pipes, sockets, threads: a worker that has switched twenty times is as large as one that has twice."""

    def held() -> tuple[int, int]:
        process = Path(f"/proc/{fresh.workers['worker-0'].pid}")
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    def there_and_back() -> None:
        fresh.switch("worker-0", DECODE, force=True)
        fresh.switch("worker-0", PREFILL)
        assert complete_in(fresh, "disaggregated") == "disaggregated"

    there_and_back()
    before = held()
    for _ in range(9):
        there_and_back()
    after = held()
    assert after[0] <= before[0] + 2, f"{before} -> {after}"
    assert after[1] <= before[1] + 2, f"{before} -> {after}"
    assert fresh.workers["worker-0"].output().count("loaded") <= 1


# --- signals and deaths amid a switch ----------------------------------------------------------------


@pytest.fixture
def two_of_decode(tiny_model, tmp_path):
    with switchable(tiny_model, tmp_path, roles=(DECODE, DECODE), worker=("--shutdown-timeout-s", "0.2")) as made:
        yield made


def test_signals_and_deaths_amid_a_switch(two_of_decode):
    """SIGTERM makes a shutdown of it, in time and with 0; a killed worker is resumed from as ever."""
    cluster = two_of_decode
    undisturbed = stream(cluster.http, PROMPT, **STORY)
    cluster.wait_empty()
    with Streaming(cluster, **STORY) as streaming:
        busy = cluster.busy()
        assert cluster.order(busy, PREFILL, timeout_s=1000).status_code == 202
        cluster.workers[busy].send(signal.SIGTERM)
        assert cluster.workers[busy].wait(EXIT_WITHIN_S) == 0
    assert cluster.num_retries() == 1
    assert (streaming.errors, streaming.text) == ([], undisturbed.text)
    cluster.start(busy, DECODE)
    cluster.wait(busy, DECODE, within_s=READY_WITHIN_S)
    cluster.wait_empty()
    with Streaming(cluster, **STORY) as streaming:
        busy = cluster.busy()
        assert cluster.order(busy, PREFILL, timeout_s=1000).status_code == 202
        cluster.workers[busy].send(signal.SIGKILL)
        assert cluster.workers[busy].wait(EXIT_WITHIN_S) == -signal.SIGKILL
    assert cluster.num_retries() == 2
    assert (streaming.errors, streaming.text) == ([], undisturbed.text)
    cluster.start(busy, DECODE)
    cluster.wait(busy, DECODE, within_s=READY_WITHIN_S)
    cluster.wait_empty()


# --- around it ---------------------------------------------------------------------------------------


def test_all_gateways_see_a_worker_leave_and_come_back_and_keys_go_with_it(tiny_model, tmp_path):
    make_keys([str(tmp_path / "keys")])
    keys = ("--curve-dir", str(tmp_path / "keys"))
    with switchable(tiny_model, tmp_path, gateway=keys, worker=keys, num_gateways=2) as cluster:
        assert complete_in(cluster, "disaggregated") == "disaggregated"
        cluster.switch("worker-0", DECODE, force=True)
        cluster.switch("worker-1", PREFILL)
        assert [cluster.has("worker-1", PREFILL, number) for number in (0, 1)] == [True, True]
        assert complete_in(cluster, "disaggregated") == "disaggregated"
        other = httpx.post(f"{cluster.urls[1]}/v1/completions", json=body_of(PROMPT, max_tokens=4), timeout=60.0)
        assert other.status_code == 200
        for process in cluster.gateways:
            assert process.output().count("left: switching to") == 2
        cluster.wait_empty()


def test_a_worker_whose_port_is_taken_stays_what_it_was(tiny_model, tmp_path):
    with switchable(tiny_model, tmp_path, roles=(DECODE,)) as cluster:
        (port,) = free_ports(1)
        cluster.start("worker-1", PREFILL, "--kv-port", str(port))
        cluster.wait("worker-1", PREFILL, within_s=READY_WITHIN_S)

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            assert cluster.order("worker-1", DECODE, force=True).status_code == 202
            refusal = "can't become a decode worker"
            wait_until(lambda: refusal in cluster.workers["worker-1"].output(), within_s=10.0, what="it says so")
            cluster.wait("worker-1", PREFILL)
        cluster.switch("worker-1", DECODE, force=True)
        cluster.switch("worker-1", PREFILL)
        cluster.switch("worker-1", DECODE, force=True)


def test_serve_lets_its_workers_switch(tiny_model, tmp_path):
    flags = ["serve", "--model", str(tiny_model), "--device", "cpu", "--port", "0", "--no-sample", *TINY_WORKERS]
    more = ["--enable-admin", "--served-model-name", MODEL_NAME]
    process = RoleProcess("serve", "launcher", [*flags, *more], tmp_path / "serve.log")
    try:
        wait_until(lambda: "ready at" in process.output(), within_s=90.0, what="serve is ready")
        (url,) = re.findall(r"ready at (\S+)", process.output())
        with httpx.Client(base_url=url, timeout=60.0) as http:

            def roles() -> list[tuple[str, str, str]]:
                return [(w["id"], w["role"], w["state"]) for w in http.get("/admin/workers").json()["workers"]]

            assert roles() == [("worker-0", PREFILL, "ready"), ("worker-1", DECODE, "ready")]
            expected = complete(http, LONG_PROMPT, ignore_eos=True).text
            assert http.post("/admin/workers/worker-0/role", json={"role": DECODE, "force": True}).status_code == 202
            both = [("worker-0", DECODE, "ready"), ("worker-1", DECODE, "ready")]
            wait_until(lambda: roles() == both, within_s=SWITCHED_WITHIN_S, what="worker-0 decodes")
            assert complete(http, LONG_PROMPT, ignore_eos=True).text == expected
        assert not re.search(r"kvsplice: .*(ended|starting it again)", process.output()), "it was no death"
    except BaseException:
        print(process.tail())
        raise
    finally:
        process.stop()
