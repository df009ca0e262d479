"""What a gateway says about the health of the cluster or of one worker, for health checks of containers."""

import re
import urllib.error
import urllib.request
from typing import Final

TIMEOUT_S: Final = 2.0
MAX_ANSWER_BYTES: Final = 4 << 20


def ask(url: str, worker_id: str | None) -> tuple[bool, str]:
    """Whether it is well, and a line for people. A worker is well while the gateway gives it requests: one that has
    stalled, drains or merely exists is not. `url` is http or https."""
    try:
        if worker_id is None:
            return True, _get(f"{url}/health").strip() or "ready"
        metrics = _get(f"{url}/metrics")
    except (OSError, ValueError) as error:
        return False, _why(error)
    return _verdict(metrics, worker_id)


def _verdict(metrics: str, worker_id: str) -> tuple[bool, str]:
    """What /metrics says of one worker."""
    pattern = rf'^kvsplice:worker_capable\{{[^}}\n]*worker="{re.escape(worker_id)}"[^}}\n]*\}} (\S+)$'
    match = re.search(pattern, metrics, re.MULTILINE)
    if match is None:
        return False, f"the gateway does not know {worker_id}"
    if float(match[1]) != 1.0:
        return False, f"the gateway gives {worker_id} no requests: it is shutting down, or its engine stands still"
    return True, f"the gateway counts on {worker_id}"


def _get(url: str) -> str:
    # No proxy of the environment: a gateway is asked directly.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=TIMEOUT_S) as response:
        return bytes(response.read(MAX_ANSWER_BYTES)).decode("utf-8", "replace")


def _why(error: OSError | ValueError) -> str:
    """The gateway's own words if it answered, else what went wrong."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read(2048).decode('utf-8', 'replace').strip()}"
    return f"the gateway does not answer: {error}"
