"""What tests of several packages share."""

from pathlib import Path

import pytest

from launcher.default_model import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded default model's checkpoint folder; fetched and converted on a machine's first run."""
    return resolve_model("smollm2-135m")
