"""Requests outlive the workers that run them: killed or told to stop amid a stream, the client gets exactly the tokens
that it would have got, once somebody can go on. Float32, so that computing a token's KV in a prompt instead of in steps
changes no token."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.client import body_of, complete, stream
from tests.e2e.cluster import DECODE, GATEWAY, PREFILL, Cluster, ClusterFlags, assert_unavailable, running_cluster
from tests.e2e.conftest import PATIENT_GATEWAY
from tests.e2e.processes import EXIT_WITHIN_S, wait_until
from tests.e2e.streaming import NOTICED_WITHIN_S, PROMPT, Streaming

NUM_TOKENS = 3000
SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 11}}
STORY = "The lighthouse keeper had not spoken to anyone for eleven days when a boat"


def retries(cluster: Cluster, reason: str) -> float:
    return cluster.gauge("request_retries_total", reason=reason) or 0.0


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_stream_outlives_its_decode_worker(healthy, name):
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **SAMPLINGS[name]}
    undisturbed = stream(healthy.http, PROMPT, **fields)
    before = retries(healthy, "decode_lost")
    with Streaming(healthy, **fields) as streaming:
        healthy.kill(DECODE)
        wait_until(lambda: not healthy.is_ready(), within_s=NOTICED_WITHIN_S, what="the gateway has noticed")
        assert streaming.ended_at is None
        assert_unavailable(healthy, missing=DECODE, present=PREFILL)
        healthy.restart(DECODE)
    assert retries(healthy, "decode_lost") == before + 1
    assert (streaming.errors, streaming.num_done, streaming.was_cut) == ([], 1, False)
    assert streaming.num_tokens == undisturbed.num_tokens == NUM_TOKENS
    assert streaming.text == undisturbed.text


def test_a_prompt_outlives_its_prefill_worker(healthy):
    prompt = [10 + i % 200 for i in range(16000)]
    before = retries(healthy, "prefill_lost")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(healthy.http.post, "/v1/completions", json=body_of(prompt, max_tokens=2, ignore_eos=True))
        wait_until(lambda: healthy.holds_blocks(PREFILL), within_s=10.0, what="the prompt is being computed")
        healthy.kill(PREFILL)
        wait_until(lambda: not healthy.is_ready(), within_s=NOTICED_WITHIN_S, what="the gateway has noticed")
        assert not call.done()
        assert_unavailable(healthy, missing=PREFILL, present=DECODE)
        healthy.restart(PREFILL)
        response = call.result(timeout=120.0)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 2
    assert retries(healthy, "prefill_lost") == before + 1


def test_a_stream_outlives_both_of_its_workers_one_after_the_other(healthy):
    """Prefill dies before decode does: the next attempt waits for both."""
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    undisturbed = stream(healthy.http, PROMPT, **fields)
    with Streaming(healthy, **fields) as streaming:
        healthy.kill(PREFILL)
        healthy.kill(DECODE)
        healthy.restart(DECODE)
        healthy.restart(PREFILL)
    assert (streaming.errors, streaming.text) == ([], undisturbed.text)


def test_a_stream_whose_worker_does_not_come_back_gets_one_error(stopped):
    stopped.start_all(order=(PREFILL, DECODE))
    stopped.start(GATEWAY, "--failover-timeout-s", "1")
    stopped.wait_ready()
    with Streaming(stopped) as streaming:
        stopped.kill(DECODE)
    (error,) = streaming.errors
    assert "the decode worker of the request was lost, and none took it over within 1 s" in error
    assert streaming.num_done == 0


# --- overload ----------------------------------------------------------------------------------------


def test_a_full_decode_worker_is_a_429_and_not_a_stream_that_breaks(stopped):
    """One request runs, one waits for its place; the third is turned away at once, although prefill has its token."""
    stopped.start_all(order=(GATEWAY, PREFILL))
    stopped.start(DECODE, "--max-num-seqs", "1", "--max-waiting", "1")
    stopped.wait_ready()
    with ThreadPoolExecutor(1) as pool, Streaming(stopped, max_tokens=1500) as running:
        waiting = pool.submit(stream, stopped.http, [20, 21], max_tokens=3, ignore_eos=True)
        in_line = {"role": DECODE, "worker": f"{DECODE}-0"}
        wait_until(lambda: stopped.gauge("num_requests_waiting", **in_line) == 1, within_s=5.0, what="one waits")
        refused = stopped.http.post("/v1/completions", json=body_of([30, 31], max_tokens=3, stream=True))
        assert running.ended_at is None
        assert not waiting.done()
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded_error")
    assert refused.headers["retry-after"]
    assert (running.errors, waiting.result().num_tokens) == ([], 3)
    assert retries(stopped, "overloaded") == 0


# --- stopping on purpose -----------------------------------------------------------------------------


def test_a_draining_worker_finishes_what_it_has(healthy):
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    before = retries(healthy, "worker_stopped")
    with Streaming(healthy, **fields) as streaming:
        healthy[DECODE].send(signal.SIGTERM)
        wait_until(lambda: not healthy.is_ready(), within_s=NOTICED_WITHIN_S, what="it takes nothing new")
    assert (streaming.errors, streaming.num_done, streaming.num_tokens) == ([], 1, NUM_TOKENS)
    healthy.stop(DECODE)
    assert retries(healthy, "worker_stopped") == before
    healthy.restart(DECODE)


def test_what_a_draining_worker_does_not_finish_goes_on_elsewhere(stopped):
    fields = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    stopped.start_all(order=(GATEWAY, PREFILL))
    stopped.start(DECODE, "--shutdown-timeout-s", "0.3")
    stopped.wait_ready()
    undisturbed = complete(stopped.http, PROMPT, **fields)
    with Streaming(stopped, **fields) as streaming:
        stopped[DECODE].send(signal.SIGTERM)
        assert stopped[DECODE].wait(EXIT_WITHIN_S) == 0
        assert streaming.ended_at is None
        stopped.stop(DECODE)
        stopped.start(DECODE)
    assert (retries(stopped, "worker_stopped"), retries(stopped, "decode_lost")) == (1, 0)
    assert (streaming.errors, streaming.num_tokens, streaming.text) == ([], 3000, undisturbed.text)


# --- the default model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal_cluster(smollm2, tmp_path_factory):
    """SmolLM2 in float32, whose processes may be killed."""
    with running_cluster(ClusterFlags(smollm2, gateway=PATIENT_GATEWAY), tmp_path_factory.mktemp("mortal")) as running:
        yield running


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_default_models_story_is_the_same_with_and_without_a_crash(mortal_cluster, name):
    fields = {"prompt": STORY, "max_tokens": 64, "ignore_eos": True, **SAMPLINGS[name]}
    mortal_cluster.wait_ready()
    undisturbed = stream(mortal_cluster.http, **fields)
    before = retries(mortal_cluster, "decode_lost")
    with Streaming(mortal_cluster, **fields) as streaming:
        mortal_cluster.kill(DECODE)
        mortal_cluster.restart(DECODE)
    assert retries(mortal_cluster, "decode_lost") == before + 1
    assert (streaming.errors, streaming.num_tokens, streaming.text) == ([], 64, undisturbed.text)
