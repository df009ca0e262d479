"""What tests of several packages share."""

import os
from pathlib import Path

# Before torch is imported anywhere: small tensors gain nothing from a second thread, and on a busy machine waiting for
# it takes ten times as long as the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from launcher.default_model import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded default model's checkpoint folder; fetched and converted on a machine's first run."""
    return resolve_model("smollm2-135m")
