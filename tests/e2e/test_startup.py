"""How long `kvsplice serve` takes from the command to "ready", with the model converted and the kernels built before.

The promise is 10 s on two cores that have nothing else to do. Tests run on machines that do, where a clock on the wall
measures the neighbours. So the test counts the processor time of all started processes instead, which waiting for a
core does not lengthen: start-up work shared by two cores in 10 s is at most 20 s of it. Busy neighbours still slow
every instruction down (caches, memory, a core's other thread), hence the slack.
"""

import os
import re
from pathlib import Path

import pytest

from kernels.select import select_kernels
from tests.e2e.processes import RoleProcess, wait_until

READY_ON_TWO_IDLE_CORES_S = 10.0
CORES = 2
SLACK = 1.5
"""For neighbours that slow instructions down. Measured beside a dozen busy processes: 10.5 s of processors,
where this allows 30."""
GIVEN_UP_AFTER_S = 240.0
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far; 0.0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS  # its own and that of the children it has waited for


def children_of(pid: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            continue
        if parent == pid:
            found.append(int(file.parent.name))
    return found


def family_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    return [pid, *(member for child in children_of(pid) for member in family_of(child))]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processor time in /proc")
@pytest.mark.timeout(GIVEN_UP_AFTER_S + 60)
def test_serve_is_ready_in_time(smollm2, tmp_path, capsys):
    import torch

    select_kernels("auto", torch.device("cpu"))  # builds them, if this machine has not yet
    flags = ["serve", "--model", str(smollm2), "--device", "cpu", "--port", "0", "--no-sample"]
    process = RoleProcess("serve", "launcher", flags, tmp_path / "serve.log")
    try:
        wall = wait_until(
            lambda: process.exit_code is not None or "ready at" in process.output(),
            within_s=GIVEN_UP_AFTER_S,
            what="serve says that it is ready",
        )
        family = family_of(process.pid)
        spent = {pid: processor_seconds(pid) for pid in family}
        told = re.search(r"ready at \S+ \((\d+\.\d) s\)", process.output())
        assert told is not None, process.tail()
    finally:
        process.terminate()
        try:
            assert process.wait(GIVEN_UP_AFTER_S) == 0, process.tail()
        finally:
            process.kill()
    with capsys.disabled():
        each = ", ".join(f"{seconds:.1f}" for seconds in spent.values())
        print(
            f"\nserve: ready after {wall:.1f} s (it says {told[1]}), {sum(spent.values()):.1f} s of processors: {each}"
        )
    assert len(family) >= 4, "launcher, gateway, prefill, decode"
    assert sum(spent.values()) <= READY_ON_TWO_IDLE_CORES_S * CORES * SLACK


def test_processor_time_is_seen():
    """The negative control: work shows up in what is counted."""
    before = processor_seconds(os.getpid())
    sum(number * number for number in range(3_000_000))
    assert processor_seconds(os.getpid()) > before
    assert os.getpid() in family_of(os.getppid())
