"""`python -m tests.e2e.faults_table`: every fault there is on a running cluster, and the table for docs/faults.md.

Arguments are parts of the names of cases, as in `decode-kill`; none means all. Exit code 1 if a case has failed.
"""

import os
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.e2e.cluster import running_cluster
from tests.e2e.fault_cases import ALL_CASES, FaultCase
from tests.e2e.fault_run import Expectations, FaultRow, fault_flags, markdown, run_case
from tests.tiny_models import save_tiny_model


def main(patterns: Sequence[str]) -> int:
    cases = [case for case in ALL_CASES if not patterns or any(part in str(case) for part in patterns)]
    rows: list[FaultRow] = []
    left = deque(cases)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model("smollm2", Path(folder) / "model", max_position_embeddings=16384)
        while left:
            try:
                _play_until_failure(left, rows, model, Path(tempfile.mkdtemp(dir=folder)))
            except AssertionError as error:
                print(f"FAILED: {error}", flush=True)
    print(f"\n{len(rows)} of {len(cases)} cases held; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(markdown(rows))
    return 0 if rows and len(rows) == len(cases) else 1


def _play_until_failure(left: deque[FaultCase], rows: list[FaultRow], model: Path, folder: Path) -> None:
    """Plays cases from `left` on one cluster and adds to `rows`; a case that fails takes its cluster with it."""
    with suppress(_CaseFailedError), running_cluster(fault_flags(model), folder) as cluster:
        expected = Expectations.ask(cluster)
        while left:
            case = left.popleft()
            try:
                rows.append(run_case(cluster, case, expected))
            except AssertionError as error:
                print(f"{case}: FAILED: {error}", flush=True)
                raise _CaseFailedError from error
            print(markdown(rows).splitlines()[-1], flush=True)  # a run that is broken off has not been for nothing


class _CaseFailedError(Exception):
    """The cluster of a failed case is of no more use."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
