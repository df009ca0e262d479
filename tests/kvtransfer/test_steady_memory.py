"""In a process of its own: what is settled stays so until its end."""

import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys, threading
import torch
from kvtransfer.steady_memory import settle_memory

def faults_of_rounds():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        buffers = [torch.zeros(200_000) for _ in range(16)]  # 800 kB each: the frames of a 2048-token chunk
        del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "settled":
    assert settle_memory()
# A thread has a heap of its own, as those that move KV have; nothing else keeps its end from being given back.
thread = threading.Thread(target=lambda: print([faults_of_rounds() for _ in range(5)][-1]))
thread.start()
thread.join()
"""

COLLECTION = """
import gc
import torch
from kvtransfer.steady_memory import settle_memory
before = len(gc.get_objects())
settle_memory()
assert before > 10_000 > len(gc.get_objects()), (before, len(gc.get_objects()))
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_frames_are_used_again_without_page_faults():
    assert int(run(PAGE_FAULTS, "settled")) < 1000
    assert int(run(PAGE_FAULTS, "not settled")) > 2000, "the default has changed: this is needed no longer"


def test_the_collector_no_longer_looks_at_what_was_imported():
    run(COLLECTION)
