"""One fault in a running cluster: load, the fault, what its clients saw, how long it took to recover.

1. The role is started with its fault; six streams, greedy and seeded, are begun at once.
2. The fault is proven. A role that has ended is started anew at once, without a fault; a stopped one goes on when the
   gateway (for a worker) has given it up, or after STOPPED_S (the gateway itself).
3. Recovered: three probes in a row, one after the other, got their right answer.
4. Each stream has ended: with its undisturbed text, or with one error behind a beginning of it.
5. Both pools are empty, and all processes run.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from kvtransfer.faults import FaultAction
from tests.e2e.cluster import GATEWAY, Cluster, ClusterFlags
from tests.e2e.fault_cases import FaultCase
from tests.e2e.load import Call, Outcome, OutcomeKind, concurrently, green_probes, play, random_prompt, solo_answers
from tests.e2e.processes import wait_until

NUM_STREAMS = 6
MAX_LOST = 0
"""Streams that may end with an error when a worker dies: a request outlives its workers, if not its gateway."""
HAPPENS_WITHIN_S = 30.0
RECOVERED_WITHIN_S = 60.0
NOTICED_WITHIN_S = 10.0
STOPPED_S = 3.0
NUM_PROBES = 3
TINY_WORKERS = ("--dtype", "float32", "--kv-cache-gib", "0.05")


def fault_flags(model: Path) -> ClusterFlags:
    """Small chunks and a small window: a long prompt takes several steps and credits. Nothing is cached, so that
    each request goes all the way."""
    workers = (*TINY_WORKERS, "--no-enable-prefix-caching")
    return ClusterFlags(model, workers, prefill=("--max-num-batched-tokens", "128"), decode=("--kv-window-mib", "1"))


@dataclass(frozen=True)
class Expectations:
    """The load of every case and the probe, each with its undisturbed answer."""

    calls: tuple[Call, ...]
    answers: tuple[str, ...]
    probe: Call
    probe_answer: str

    @classmethod
    def ask(cls, cluster: Cluster) -> "Expectations":
        """Asks an undisturbed cluster."""
        calls, probe = fault_load(), Call((20, 21, 22, 23), 8, mode="disaggregated")
        *answers, probe_answer = solo_answers(cluster.http, [*calls, probe])
        return cls(calls, tuple(answers), probe, probe_answer)


def fault_load() -> tuple[Call, ...]:
    """Six streams of different lengths, long enough to be running when the fault comes; odd ones with a seed."""
    rng = random.Random(6)
    return tuple(
        Call(
            random_prompt(rng, 20 + 150 * index),
            150 + 50 * index,
            sampling={"temperature": 0.8, "seed": 7 + index} if index % 2 else {"temperature": 0},
        )
        for index in range(NUM_STREAMS)
    )


@dataclass(frozen=True)
class FaultRow:
    """What one fault has cost. `num_running`: streams that had not ended when it came."""

    case: FaultCase
    num_running: int
    kinds: Mapping[OutcomeKind, int]
    recovered_s: float
    slowest_s: float

    @property
    def num_lost(self) -> int:
        """Of those that were let in."""
        return NUM_STREAMS - self.kinds.get(OutcomeKind.RIGHT, 0) - self.num_refused

    @property
    def num_refused(self) -> int:
        return self.kinds.get(OutcomeKind.REFUSED, 0)


def run_case(cluster: Cluster, case: FaultCase, expected: Expectations) -> FaultRow:
    """Plays one case on a ready cluster and leaves it ready."""
    cluster.stop(case.role)
    cluster.start(case.role, *case.flags)
    cluster.wait_ready()
    cluster.wait_pools_empty()
    calls = [replace(call, mode=case.mode) for call in expected.calls]
    with concurrently(cluster.http, calls, expected.answers) as streams:
        happened_at, num_running = begin_fault(cluster, case, streams)
        await_fault(cluster, case)
        bring_back(cluster, case)
        green_probes(lambda: play(cluster.http, expected.probe, expected.probe_answer), NUM_PROBES, RECOVERED_WITHIN_S)
        recovered_s = time.monotonic() - happened_at
    outcomes = [stream.result() for stream in streams]
    check_outcomes(case, outcomes)
    cluster.wait_ready()
    cluster.wait_pools_empty(within_s=NOTICED_WITHIN_S)
    kinds = Counter(outcome.kind for outcome in outcomes)
    return FaultRow(case, num_running, kinds, recovered_s, max(outcome.seconds for outcome in outcomes))


def await_fault(cluster: Cluster, case: FaultCase, within_s: float = HAPPENS_WITHIN_S) -> None:
    """Fails unless the fault is proven to have happened."""
    process = cluster[case.role]
    wait_until(lambda: case.has_happened(process), within_s=within_s, what=f"{case} has happened")


def begin_fault(cluster: Cluster, case: FaultCase, streams: Sequence[Future[Outcome]]) -> tuple[float, int]:
    """When the process says that the fault begins, or the gateway gets its signal; and how many streams run then."""
    if case.event is not None:
        return await_begin(cluster, case, streams)
    # Of this gateway's own counting: what workers say with their beats may come when the load is over.
    wait_until(lambda: cluster.gauge("generation_tokens_total"), within_s=HAPPENS_WITHIN_S, what="the load has arrived")
    happened_at, num_running = time.monotonic(), _num_running(streams)
    cluster[case.role].send(signal.SIGKILL if case.action is FaultAction.KILL else signal.SIGSTOP)
    return happened_at, num_running


def await_begin(cluster: Cluster, case: FaultCase, streams: Sequence[Future[Outcome]]) -> tuple[float, int]:
    """Counts before each look: a worker that dies with a last word ends its streams at once."""
    process, running = cluster[case.role], [_num_running(streams)]

    def has_begun() -> bool:
        running.append(_num_running(streams))
        return case.has_begun(process)

    wait_until(has_begun, within_s=HAPPENS_WITHIN_S, what=f"{case} has begun")
    return time.monotonic(), running[-2]


def _num_running(streams: Sequence[Future[Outcome]]) -> int:
    return sum(not stream.done() for stream in streams)


def bring_back(cluster: Cluster, case: FaultCase) -> None:
    if case.action is not FaultAction.STOP:
        cluster.retire(case.role)
        cluster.restart(case.role)
        return
    if case.role == GATEWAY:
        time.sleep(STOPPED_S)
    else:
        wait_until(lambda: not cluster.is_ready(), within_s=NOTICED_WITHIN_S, what="the gateway has noticed")
    cluster[case.role].send(signal.SIGCONT)


def check_outcomes(case: FaultCase, outcomes: Iterable[Outcome]) -> None:
    """Each stream is right, was refused at the door, or has one error; only a gateway's death may cut connections."""
    allowed = {OutcomeKind.RIGHT, OutcomeKind.REFUSED, OutcomeKind.ERROR}
    if case.role == GATEWAY:
        allowed.add(OutcomeKind.CUT)
    unexpected = [outcome for outcome in outcomes if outcome.kind not in allowed]
    assert not unexpected, unexpected
    lost = [outcome for outcome in outcomes if outcome.kind not in (OutcomeKind.RIGHT, OutcomeKind.REFUSED)]
    assert case.role == GATEWAY or len(lost) <= MAX_LOST, lost


def markdown(rows: Iterable[FaultRow]) -> str:
    """One row a fault."""
    lines = [
        "| role | fault | moment | streams running | lost | refused | recovered after, s | slowest stream, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        moment = "amid load" if row.case.event is None else row.case.event.value
        lines.append(
            f"| {row.case.role} | {row.case.action.value} | {moment} | {row.num_running} of {NUM_STREAMS} "
            f"| {row.num_lost} | {row.num_refused} | {row.recovered_s:.1f} | {row.slowest_s:.1f} |"
        )
    return "\n".join(lines)
