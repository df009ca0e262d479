"""A server of an experiment's own: `kvsplice serve` on a free port, ready when the block begins, gone when it ends."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Final

import httpx

from experiments.stream_client import ServerError
from launcher.plan import LOOPBACK
from launcher.ports import usable_port

READY_WITHIN_S: Final = 600.0
STOPPED_WITHIN_S: Final = 15.0
_TICK_S: Final = 0.2
_TAIL_CHARS: Final = 4000


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server started with `flags`. It dies with this process. Raises ServerError, with the end of its log,
    if it does not become ready."""
    port = usable_port(LOOPBACK, 0)
    command = [sys.executable, "-u", "-m", "launcher.child", "serve", f"--port={port}", "--no-sample", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)
        try:
            url = f"http://{LOOPBACK}:{port}"
            _wait_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not _is_ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerError(f"kvsplice serve does not become ready:\n{_tail(log)}")
        time.sleep(_TICK_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health?mode=disaggregated", timeout=5.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOPPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-_TAIL_CHARS:]
