"""A decode pool far too small for its streams, in real processes: each gets what it gets alone, whatever becomes of the
KV of those that lose their blocks, and what can never fit is refused before anything is sent.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.client import body_of, complete, stream
from tests.e2e.cluster import DECODE, Cluster, ClusterFlags, running_cluster
from tests.e2e.conftest import PATIENT_GATEWAY
from tests.e2e.processes import wait_until

NUM_STREAMS, NUM_TOKENS = 6, 400
SMALL = ("--kv-cache-gib", "0.001", "--max-model-len", "1000", "--no-enable-prefix-caching")
"""87 blocks of 16 tokens: 1392 of the 2600 that the streams come to."""
MODES = {
    "recompute": (),
    "swap": ("--preemption-mode", "swap", "--swap-space", "0.01"),
    "little-swap": ("--preemption-mode", "swap", "--swap-space", "0.001"),
}


@pytest.fixture(scope="module", params=MODES)
def tight(request, tiny_model, tmp_path_factory) -> Cluster:
    flags = ClusterFlags(
        tiny_model, ("--dtype", "float32"), gateway=PATIENT_GATEWAY, decode=(*SMALL, *MODES[request.param])
    )
    with running_cluster(flags, tmp_path_factory.mktemp(request.param)) as running:
        running.mode = request.param
        yield running


def calls():
    for number in range(NUM_STREAMS):
        sampling = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
        prompt = [5 + (number * 7 + at) % 300 for at in range(20 + 5 * number)]
        yield {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}


def count(cluster, name) -> float:
    return cluster.gauge(name, role=DECODE, worker=f"{DECODE}-0")


def test_streams_that_lose_their_blocks_to_each_other_equal_their_solo_runs(tight):
    alone = [complete(tight.http, **call).text for call in calls()]
    assert count(tight, "num_preemptions_total") == 0
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(lambda call: stream(tight.http, **call), calls()))
    assert [answer.text for answer in together] == alone
    assert [answer.num_tokens for answer in together] == [NUM_TOKENS] * NUM_STREAMS
    wait_until(lambda: count(tight, "num_preemptions_total") > 0, within_s=20, what="the last beat has come")
    tight.wait_pools_empty()
    assert (count(tight, "swapped_out_blocks_total") > 0) == (tight.mode != "recompute")
    assert count(tight, "swapped_in_blocks_total") == count(tight, "swapped_out_blocks_total")
    assert count(tight, "swap_free_blocks") == count(tight, "swap_blocks")
    assert (count(tight, "swap_blocks") > 0) == (tight.mode != "recompute")
    if tight.mode == "swap":
        assert count(tight, "swap_refusals_total") == 0


def test_a_request_that_can_never_fit_is_refused_at_once(tight):
    response = tight.http.post("/v1/completions", json=body_of([10] * 700, max_tokens=700))
    assert response.status_code == 400
    assert "1400" in response.json()["error"]["message"]
    tight.wait_pools_empty()
