"""A soak: random load with known answers, random faults beside it, and at the end the account.

Modes are left to the gateway and prefixes are shared, as by default.

1. On an undisturbed cluster each of NUM_CALLS random calls is made alone: its text is what it must be ever after.
2. Clients make these calls at random, again and again; the troublemaker does its work.
3. The faults end, the last calls are answered, and both pools must be empty.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.cluster import DECODE, GATEWAY, PREFILL, Cluster, ClusterFlags, running_cluster
from tests.e2e.fault_run import TINY_WORKERS
from tests.e2e.load import OutcomeKind, random_call, solo_answers
from tests.soak.clients import Clients
from tests.soak.faults import Troublemaker

NUM_CALLS = 40
NUM_CLIENTS = 6
LONG_S = 300.0
"""From here on the gateway has its share of the faults."""


@dataclass(frozen=True)
class Account:
    """What a soak has come to. `leaked_blocks`: held by a worker when no request was left."""

    seed: int
    seconds: float
    cores: int
    load_average: float
    requests: dict[str, int]
    retries: int
    errors: dict[str, int]
    faults: dict[str, int]
    slowest_recovery_s: float
    leaked_blocks: int
    wrong: list[str]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def as_table(self) -> str:
        """Markdown, one line a figure."""
        rows = {
            "seconds": f"{self.seconds:.0f}",
            "cores, load average": f"{self.cores}, {self.load_average:.1f}",
            **{f"calls: {kind}": str(count) for kind, count in self.requests.items()},
            "retries by clients": str(self.retries),
            **{f"fault: {name}": str(count) for name, count in self.faults.items()},
            "slowest recovery, s": f"{self.slowest_recovery_s:.1f}",
            "leaked blocks": str(self.leaked_blocks),
        }
        return "\n".join(
            ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
        )


def soak(model: Path, folder: Path, seconds: float, seed: int) -> Account:
    """Raises AssertionError if a process does not come back, or the pools do not empty."""
    rng = random.Random(seed)
    calls = [random_call(rng, max_prompt=1200, max_tokens=250) for _ in range(NUM_CALLS)]
    roles = (PREFILL, DECODE, GATEWAY) if seconds >= LONG_S else (PREFILL, DECODE)
    with running_cluster(ClusterFlags(model, TINY_WORKERS), folder) as cluster:
        known = list(zip(calls, solo_answers(cluster.http, calls), strict=True))
        trouble = Troublemaker(cluster, roles, rng)
        start = time.monotonic()
        with Clients(cluster.http, known, NUM_CLIENTS, seed) as clients:
            trouble.run(start + seconds)
        elapsed = time.monotonic() - start
        return _account(cluster, clients, trouble, elapsed, seed)


def _account(cluster: Cluster, clients: Clients, trouble: Troublemaker, elapsed: float, seed: int) -> Account:
    cluster.wait_ready()
    leaked = _leaked_blocks(cluster, (PREFILL, DECODE))
    return Account(
        seed=seed,
        seconds=elapsed,
        cores=os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
        requests={kind.value: clients.kinds[kind] for kind in OutcomeKind},
        retries=clients.num_retries,
        errors=dict(clients.errors),
        faults=dict(Counter(f"{event.role} {event.fault.value}" for event in trouble.events)),
        slowest_recovery_s=max((event.recovered_s for event in trouble.events), default=0.0),
        leaked_blocks=leaked,
        wrong=clients.wrong[:5],
    )


def _leaked_blocks(cluster: Cluster, roles: Sequence[str], within_s: float = 15.0) -> int:
    """Blocks still held after `within_s` without a client; usually 0 long before."""
    deadline = time.monotonic() + within_s
    while not cluster.pools_are_empty() and time.monotonic() < deadline:
        time.sleep(0.1)
    held = 0.0
    for role in roles:
        blocks, free = (cluster.gauge(name, role=role, worker=f"{role}-0") for name in ("kv_blocks", "kv_free_blocks"))
        assert blocks is not None, f"{role} is not there"
        assert free is not None, f"{role} is not there"
        held += blocks - free
    return int(held)
