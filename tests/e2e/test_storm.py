"""Many clients that leave at any moment: before the first token, during the transfer, while decode runs. Nothing is
kept of them, whoever comes next is served as fast as before, and no process grows."""

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import body_of, complete
from tests.e2e.cluster import DECODE, PREFILL, ROLES, Cluster, ClusterFlags, running_cluster
from tests.e2e.processes import wait_until

NUM_ROUNDS, NUM_CALLS = 4, 300
MAX_GROWTH_MIB = 16.0
"""Of one process's memory after the first round, which fills caches and arenas."""
MAX_SLOWDOWN = 3.0
"""Of a probe, against the median before the storm; `SLACK_S` more, as cores are shared."""
SLACK_S = 0.25
FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.05", "--max-waiting", "512")
PROBE = [30, 31, 32, 33]


class Departure(Enum):
    """When a client leaves."""

    BEFORE_FIRST_TOKEN = "before the first token"
    DURING_TRANSFER = "during the transfer"  # the first token is prefill's, and comes while the KV travels
    DURING_DECODE = "during decode"
    NEVER = "never"


@dataclass(frozen=True)
class Visitor:
    """One call, and when its client leaves; `delay_s` counts from the moment named."""

    prompt: list[int]
    max_tokens: int
    departure: Departure
    delay_s: float


def visitors(rng: random.Random) -> list[Visitor]:
    """Prompts of 5 to 1,500 tokens; a quarter of the clients each way."""
    made = []
    for index in range(NUM_CALLS):
        prompt = [rng.randrange(5, 300) for _ in range(rng.choice((5, 60, 300, 1500)))]
        departure = list(Departure)[index % len(Departure)]
        made.append(Visitor(prompt, rng.randint(20, 60), departure, rng.random() * 0.3))
    rng.shuffle(made)
    return made


@pytest.fixture(scope="module")
def stormy(tiny_model, tmp_path_factory):
    flags = ClusterFlags(
        tiny_model,
        FLAGS,
        gateway=("--max-concurrent-requests", "512", "--default-mode", "disaggregated"),
        decode=("--kv-window-mib", "1"),
    )
    with running_cluster(flags, tmp_path_factory.mktemp("storm")) as running:
        yield running


def test_a_storm_of_clients_that_leave_costs_nothing(stormy):
    rng = random.Random(4)
    before = probe_seconds(stormy)
    stormy.wait_pools_empty()
    # Known from the first beat on; a worker is ready by its Hello.
    wait_until(lambda: all(free_blocks(stormy).values()), within_s=10.0, what="the workers have said their pools")
    free_at_start = free_blocks(stormy)
    resident: list[dict[str, float]] = []
    seen: Counter[Departure] = Counter()
    for _ in range(NUM_ROUNDS):
        seen += asyncio.run(storm(stormy.url, visitors(rng)))
        stormy.wait_pools_empty(within_s=30.0)
        assert free_blocks(stormy) == free_at_start
        assert probe_seconds(stormy) < MAX_SLOWDOWN * before + SLACK_S
        resident.append({role: resident_mib(stormy[role].pid) for role in ROLES})
    assert sum(seen.values()) == NUM_ROUNDS * NUM_CALLS
    # The negative control: without these the storm was none. A short request may be over before its client leaves.
    assert min(seen[departure] for departure in Departure) >= NUM_ROUNDS * NUM_CALLS // 20, seen
    growth = {role: resident[-1][role] - resident[0][role] for role in ROLES}
    assert max(growth.values()) < MAX_GROWTH_MIB, resident


async def storm(url: str, calls: list[Visitor]) -> Counter[Departure]:
    """All calls at once; how many clients left when. Fails unless each that stayed got a whole answer."""
    limits = httpx.Limits(max_connections=NUM_CALLS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as http:
        return Counter(await asyncio.gather(*(visit(http, call) for call in calls)))


async def visit(http: httpx.AsyncClient, call: Visitor) -> Departure:
    """When the client has left, which may be otherwise than planned: the answer was complete first."""
    body = body_of(call.prompt, stream=True, max_tokens=call.max_tokens, ignore_eos=True)
    num_chunks = 0
    try:
        async with asyncio.timeout(call.delay_s if call.departure is Departure.BEFORE_FIRST_TOKEN else 100.0):
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    num_chunks += line.startswith("data:")
                    if await leaves(call, num_chunks):
                        return call.departure
                    if line == "data: [DONE]":
                        return Departure.NEVER
    except TimeoutError:
        assert call.departure is Departure.BEFORE_FIRST_TOKEN, f"a client that stayed waits since 100 s: {call}"
        return Departure.BEFORE_FIRST_TOKEN if num_chunks == 0 else Departure.DURING_DECODE
    raise AssertionError("a stream without an end")


async def leaves(call: Visitor, num_chunks: int) -> bool:
    """Whether the client leaves now."""
    if call.departure is Departure.DURING_TRANSFER:
        return num_chunks == 1
    if call.departure is Departure.DURING_DECODE:
        return num_chunks >= 2 + int(call.delay_s * 50)
    return False


def probe_seconds(cluster: Cluster) -> float:
    """Median of five calls of eight tokens."""
    return statistics.median(_timed(cluster) for _ in range(5))


def _timed(cluster: Cluster) -> float:
    start = time.monotonic()
    assert complete(cluster.http, PROBE, max_tokens=8, ignore_eos=True).num_tokens == 8
    return time.monotonic() - start


def free_blocks(cluster: Cluster) -> dict[str, float | None]:
    return {role: cluster.gauge("kv_free_blocks", role=role, worker=f"{role}-0") for role in (PREFILL, DECODE)}


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no memory")
