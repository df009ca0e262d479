"""A prompt gives the same tokens wherever it is computed, and there is somebody to compute it as long as decode lives.

Float32, so that chunks of another size change no token. What is compared with comes from a cluster that always takes
the whole way and keeps no KV for later: nothing there was ever computed by decode, or found in a cache.
"""

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.client import body_of, complete, stream
from tests.e2e.cluster import DECODE, MODEL_NAME, PREFILL, Cluster, ClusterFlags, running_cluster, samples
from tests.e2e.conftest import PATIENT_GATEWAY, TINY_WORKERS
from tests.e2e.processes import RoleProcess, wait_until
from tests.e2e.streaming import PROMPT, Streaming

HEADER = "X-KVSplice-Mode"
THRESHOLD = 64
NUM_TOKENS = 600
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 11},
    "truncated": {"temperature": 1.2, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "logit_bias": {"40": 2.0},
    },
    "stops": {
        "temperature": 1.0,
        "seed": 5,
        "min_tokens": 6,
        "stop_token_ids": list(range(5, 105)),
        "ignore_eos": False,
    },
}
LENGTHS = (1, 15, 16, 17, 64, 65, 300, 900)
"""Around a block (16), the threshold (64) and one step's share of prompt tokens on decode (256)."""


@pytest.fixture(scope="module")
def auto(tiny_model, tmp_path_factory):
    flags = ClusterFlags(tiny_model, TINY_WORKERS, gateway=(*PATIENT_GATEWAY, "--default-mode", "auto"))
    with running_cluster(flags, tmp_path_factory.mktemp("auto")) as running:
        wait_for_prefill(running)
        yield running


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    """Disaggregated, without caches."""
    flags = ClusterFlags(tiny_model, (*TINY_WORKERS, "--no-enable-prefix-caching"))
    with running_cluster(flags, tmp_path_factory.mktemp("plain")) as running:
        yield running


def wait_for_prefill(cluster: Cluster) -> None:
    def ready() -> bool:
        return cluster.http.get("/health", params={"mode": "disaggregated"}).status_code == 200

    wait_until(ready, within_s=60.0, what="there is a prefill worker")


def answer(cluster: Cluster, prompt, mode: str | None = None, **fields) -> tuple[tuple, str]:
    """(text, tokens, how it ended) of one call, and the mode that it got."""
    body = body_of(prompt, **{"max_tokens": 24, "ignore_eos": True, "skip_special_tokens": False, **fields})
    response = cluster.http.post("/v1/completions", json=body, headers={HEADER: mode} if mode else {})
    assert response.status_code == 200, response.text
    payload = response.json()
    (choice,) = payload["choices"]
    said = (choice["text"], payload["usage"]["completion_tokens"], choice["finish_reason"])
    return said, response.headers[HEADER]


def prompt_of(length: int, salt: int) -> list[int]:
    """Prompts of one salt begin alike, those of others do not."""
    return [salt + 5, *(5 + (7 * index + salt) % 300 for index in range(length - 1))]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_mode_gives_the_same_tokens(auto, plain, name):
    fields = SAMPLINGS[name]
    salt = 10 * list(SAMPLINGS).index(name)
    for length in LENGTHS:
        prompt = prompt_of(length, salt)
        expected, how = answer(plain, prompt, **fields)
        assert how == "disaggregated"
        for mode in ("local", "disaggregated", "auto"):  # local first: decode has the newest part of it from nobody
            said, how = answer(auto, prompt, mode, **fields)
            assert said == expected, (mode, length)
            assert mode == "auto" or how == mode
            assert mode != "auto" or how == "local", "decode has it all by now"


def test_auto_goes_by_what_decode_has_to_compute(auto):
    first, second = prompt_of(THRESHOLD, 200), prompt_of(THRESHOLD + 1, 210)
    assert answer(auto, first)[1] == "local"
    assert answer(auto, second)[1] == "disaggregated"
    assert answer(auto, second)[1] == "local"
    assert answer(auto, [*second, *prompt_of(THRESHOLD - 1, 220)])[1] == "local"
    assert answer(auto, [*second, *prompt_of(THRESHOLD + 20, 230)])[1] == "disaggregated"


@pytest.mark.parametrize("name", ["greedy", "penalties"])
def test_a_chat_of_ten_turns_in_auto_mode_is_that_of_disaggregated_mode(auto, plain, name):
    modes = []
    messages = [{"role": "system", "content": f"Answer in the manner of a {name} lighthouse keeper. " * 5}]
    for turn in range(10):
        question = "And then the keeper said, after long thought: " * 4 if turn == 5 else f"turn {turn}?"
        messages.append({"role": "user", "content": question})
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "ignore_eos": True, **SAMPLINGS[name]}
        answers = [cluster.http.post("/v1/chat/completions", json=body) for cluster in (auto, plain)]
        said, expected = (response.json()["choices"][0] for response in answers)
        assert said == expected, f"turn {turn}"
        modes.append(answers[0].headers[HEADER])
        assert answers[1].headers[HEADER] == "disaggregated"
        messages.append({"role": "assistant", "content": said["message"]["content"]})
    assert [turn for turn, mode in enumerate(modes) if mode == "disaggregated"] == [0, 5], "the long prompts"
    auto.wait_pools_empty()


def test_one_token_comes_from_either(auto, plain):
    prompt = prompt_of(100, 240)
    expected = answer(plain, prompt, max_tokens=1)[0]
    assert answer(auto, prompt, "local", max_tokens=1) == (expected, "local")
    assert answer(auto, prompt, "disaggregated", max_tokens=1) == (expected, "disaggregated")


def test_a_local_stream_outlives_its_worker(auto):
    prompt = prompt_of(THRESHOLD - 2, 270)  # with the three tokens that the stream has by then it is a long one
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 11}
    undisturbed = stream(auto.http, prompt, **fields)
    before = auto.gauge("request_mode_total", mode="local")
    with Streaming(auto, prompt=prompt, **fields) as streaming:
        auto.kill(DECODE)
        auto.restart(DECODE)
    assert (streaming.errors, streaming.num_done, streaming.num_tokens) == ([], 1, NUM_TOKENS)
    assert streaming.text == undisturbed.text
    assert auto.gauge("request_retries_total", reason="decode_lost") == 1
    assert auto.gauge("request_mode_total", mode="local") == before, "its last attempt took the whole way"


def test_without_prefill_all_but_the_explicit_goes_on(auto):
    prompt = prompt_of(300, 250)
    auto.wait_ready()
    auto.kill(PREFILL)
    wait_until(
        lambda: auto.http.get("/health", params={"mode": "disaggregated"}).status_code == 503,
        within_s=5.0,
        what="the gateway has noticed",
    )
    try:
        assert auto.http.get("/health").json() == {"status": "ready"}
        said, how = answer(auto, prompt)
        assert how == "local"
        assert answer(auto, prompt, "local") == (said, "local")
        refused = auto.http.post("/v1/completions", json=body_of(prompt), headers={HEADER: "disaggregated"})
        assert (refused.status_code, "no prefill worker" in refused.text) == (503, True)
    finally:
        auto.restart(PREFILL)
        wait_for_prefill(auto)
    assert answer(auto, prompt, "disaggregated") == (said, "disaggregated")


def test_a_prompt_whose_prefill_worker_dies_is_computed_on_decode(auto):
    prompt = [10 + i % 200 for i in range(4000)]
    auto[PREFILL].send(signal.SIGSTOP)
    try:
        said, how = answer(auto, prompt, "auto", max_tokens=4)  # it is silent from now on, and given up
    finally:
        auto.kill(PREFILL)
        auto.restart(PREFILL)
        wait_for_prefill(auto)
    assert how == "disaggregated", "the first attempt's"
    assert auto.gauge("request_retries_total", reason="prefill_lost") == 1
    assert answer(auto, prompt, "disaggregated", max_tokens=4)[0] == said


@pytest.mark.parametrize("mode", ["", "remote"])
def test_an_unknown_mode_is_a_400(auto, mode):
    response = auto.http.post("/v1/completions", json=body_of(PROMPT), headers={HEADER: mode})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


# --- workers that do both ----------------------------------------------------------------------------


def assert_replicas_share_the_load(http: httpx.Client) -> None:
    """Calls at once go to both; a prompt that goes on like an earlier one finds what that has left, on whichever."""
    prompts = [prompt_of(300, salt) for salt in range(262, 290, 7)]
    fields = {"max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert all(answer.num_tokens == 200 for answer in pool.map(lambda one: complete(http, one, **fields), prompts))
    wait_until(lambda: all(looked_up(http)), within_s=5.0, what="both replicas have had prompts")
    for prompt in prompts:
        usage = complete(http, [*prompt, 7, 8, 9], max_tokens=2).usage
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 288, "18 full blocks of 16"


def looked_up(http: httpx.Client) -> list[float]:
    """Prompt tokens that each worker has looked up in its cache."""
    return samples(http, "prefix_cache_queries_total")


def test_serve_without_prefill_workers(tiny_model, plain, tmp_path):
    flags = ["serve", "--model", str(tiny_model), "--device", "cpu", "--port", "0", "--no-sample", *TINY_WORKERS]
    more = ["--prefill", "0", "--decode", "2", "--served-model-name", MODEL_NAME]
    process = RoleProcess("serve", "launcher", [*flags, *more], tmp_path / "serve.log")
    try:
        wait_until(lambda: "ready at" in process.output(), within_s=90.0, what="serve is ready")
        assert "starting 2 workers for prefill and decode" in process.output()
        (url,) = re.findall(r"ready at (\S+)", process.output())
        with httpx.Client(base_url=url, timeout=60.0) as http:
            assert len(looked_up(http)) == 2, "ready means that both are there"
            for length in (3, 300):
                prompt = prompt_of(length, 260)
                expected = complete(plain.http, prompt, ignore_eos=True)
                assert complete(http, prompt, ignore_eos=True).text == expected.text
            response = http.post("/v1/completions", json=body_of(PROMPT, max_tokens=2))
            assert response.headers[HEADER] == "local"
            assert_replicas_share_the_load(http)
            refused = http.post("/v1/completions", json=body_of(PROMPT), headers={HEADER: "disaggregated"})
            assert refused.status_code == 503
    except BaseException:
        print(process.tail())
        raise
    finally:
        process.stop()
