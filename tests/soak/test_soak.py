"""A minute of random load beside random faults. `make soak` takes longer, and kills the gateway as well."""

import pytest

from tests.soak.run import NUM_CLIENTS, soak
from tests.tiny_models import save_tiny_model

SECONDS = 45.0
"""With start and end about a minute."""


@pytest.mark.timeout(400)
def test_a_minute_of_faults_leaks_no_block_and_gives_no_wrong_token(tmp_path):
    model = save_tiny_model("smollm2", tmp_path / "model", max_position_embeddings=16384)
    account = soak(model, tmp_path, SECONDS, seed=20)
    print(account.as_json())
    assert account.wrong == []
    assert account.requests["wrong"] == account.requests["hung"] == account.requests["cut"] == 0
    assert account.leaked_blocks == 0
    assert account.requests["error"] == 0, "a request was lost that had been let in"
    assert sum(account.faults.values()) >= 2, "nothing happened"
    assert account.requests["right"] > 10 * NUM_CLIENTS, "hardly any load"
