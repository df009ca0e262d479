"""What a gateway says about the health of the cluster or of one worker, for health checks of containers."""

import re
import urllib.error
import urllib.request
from typing import Final

TIMEOUT_S: Final = 2.0
MAX_ANSWER_BYTES: Final = 4 << 20


def ask(url: str, worker_id: str | None) -> tuple[bool, str]:
    """Whether it is well, and a line for people. A worker is well while the gateway counts on it, which takes its
    heartbeats: a process that merely exists is not."""
    try:
        if worker_id is None:
            return True, _get(f"{url}/health").strip() or "ready"
        metrics = _get(f"{url}/metrics")
    except (OSError, ValueError) as error:
        return False, _why(error)
    known = re.search(rf'^kvsplice:[a-z_]+\{{[^}}\n]*worker="{re.escape(worker_id)}"', metrics, re.MULTILINE)
    return known is not None, f"the gateway {'counts on' if known else 'does not know'} {worker_id}"


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # http or https; anything else is a ValueError
        return bytes(response.read(MAX_ANSWER_BYTES)).decode("utf-8", "replace")


def _why(error: OSError | ValueError) -> str:
    """The gateway's own words if it answered, else what went wrong."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read(2048).decode('utf-8', 'replace').strip()}"
    return f"the gateway does not answer: {error}"
