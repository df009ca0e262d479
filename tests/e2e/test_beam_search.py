"""Beam search through HTTP and real processes against a plain one over transformers' logits in float32."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.beams import plain_beams
from tests.e2e.client import body_of
from tests.e2e.processes import wait_until
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import torch_threads

HEADER = "X-KVSplice-Mode"
MARGIN = 1e-3
"""Sums in another order differ by about 1e-4."""
CASES = (("english fact", 4, 8), ("emoji", 3, 10), ("python", 2, 16))
"""Prompt, width, tokens."""


class Truth:
    """Log probabilities of the next token, by transformers."""

    def __init__(self, folder) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.eos_token_id = self._model.generation_config.eos_token_id

    def after(self, token_ids):
        with torch_threads(1), torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)]), logits_to_keep=1).logits[0, -1]
            return logits.log_softmax(-1).tolist()


@pytest.fixture(scope="module")
def truth(smollm2):
    return Truth(smollm2)


def search(cluster, ids, mode="auto", **fields):
    """Token ids of each beam, and the whole answer."""
    fields = {"use_beam_search": True, "logprobs": 0, "return_tokens_as_token_ids": True, **fields}
    response = cluster.http.post("/v1/completions", json=body_of(ids, **fields), headers={HEADER: mode})
    assert response.status_code == 200, response.text
    assert mode in ("auto", response.headers[HEADER])
    answer = response.json()
    names = [choice["logprobs"]["tokens"] for choice in answer["choices"]]
    return [tuple(int(name.removeprefix("token_id:")) for name in beam) for beam in names], answer


@pytest.mark.parametrize(("name", "width", "max_tokens"), CASES)
def test_the_beams_of_a_plain_search(cluster, truth, name, width, max_tokens):
    prompt = next(prompt for prompt in PROMPTS if prompt.name == name)
    ids = truth.tokenizer.encode(prompt.text, add_special_tokens=False)
    expected = plain_beams(
        lambda output: truth.after([*ids, *output]),
        width=width,
        num_best=width,
        max_tokens=max_tokens,
        stop_ids=[truth.eos_token_id],
    )
    print(f"{name}: margin {expected.margin:.2g}, {expected.outputs}")
    assert expected.margin > MARGIN, "too near to be told apart"
    for mode in ("disaggregated", "local"):
        beams, answer = search(cluster, ids, mode, n=width, max_tokens=max_tokens)
        assert beams == expected.outputs
        sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
        scores = [total / len(beam) for total, beam in zip(sums, beams, strict=True)]
        assert scores == pytest.approx(expected.scores, abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == len(ids)
    cluster.wait_pools_empty()


def test_workers_say_what_ends_an_output(cluster, truth):
    """The chat's end of turn, which the model says after an answer: it ends a beam, unless it is to be ignored."""
    messages = [{"role": "user", "content": "Say yes."}]
    body = {"messages": messages, "use_beam_search": True, "n": 3, "max_tokens": 12, "logprobs": True}
    body["length_penalty"] = 0  # the shortest first
    for ignored in (False, True):
        response = cluster.http.post("/v1/chat/completions", json={**body, "ignore_eos": ignored})
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert ("stop" in [choice["finish_reason"] for choice in choices]) is not ignored
        for choice in choices:
            tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
            is_stopped = choice["finish_reason"] == "stop"
            assert is_stopped == (not ignored and tokens[-1] == truth.tokenizer.eos_token)
            assert len(tokens) == 12 or is_stopped
    cluster.wait_pools_empty()


def test_beams_share_the_kv_of_the_prompt(healthy):
    """A thousand tokens are computed by prefill, go over once, and each later step computes a few."""
    ids = [10 + number * 11 % 289 for number in range(1003)]
    assert healthy.http.post("/reset_prefix_cache").status_code == 200
    names = ("kv_transfer_bytes_total", "prefix_cache_queries_total", "prefix_cache_hits_total")

    def counted(role):
        return [healthy.gauge(name, role=role, worker=f"{role}-0") for name in names]

    def added(role):
        return [now - then for now, then in zip(counted(role), before[role], strict=True)]

    before = {role: counted(role) for role in ("prefill", "decode")}
    search(healthy, ids, "disaggregated", n=4, max_tokens=8, ignore_eos=True)
    lengths = [len(ids), *(len(ids) + step for step in range(1, 8) for _ in range(4))]
    wait_until(lambda: added("decode")[1] >= sum(lengths), within_s=10.0, what="the counters are here")
    wait_until(lambda: added("prefill")[0] > 0, within_s=10.0, what="those of prefill too")
    assert added("prefill")[1:] == [len(ids), 0], "one prompt, computed whole"
    assert added("prefill")[0] == added("decode")[0]
    _, num_asked, num_found = added("decode")
    print(f"{num_asked - num_found} of {num_asked} prompt tokens not in decode's cache, of which {len(ids)} were sent")
    assert num_asked == sum(lengths)
    assert 4 * 7 <= num_asked - num_found - len(ids) <= 4 * 7 * 16, "of each beam and step the tail of a block"
    healthy.wait_pools_empty()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_dies_costs_no_beam(healthy, role):
    ids = [10 + number * 11 % 289 for number in range(503)]
    asked = {"n": 3, "max_tokens": 150, "ignore_eos": True}
    expected, _ = search(healthy, ids, "disaggregated", **asked)
    assert healthy.http.post("/reset_prefix_cache").status_code == 200
    num_before = healthy.gauge("generation_tokens_total")
    with ThreadPoolExecutor() as pool:
        again = pool.submit(search, healthy, ids, "disaggregated", **asked)
        wait_until(
            lambda: again.done() or healthy.gauge("generation_tokens_total") > num_before, within_s=10.0, what="it runs"
        )
        healthy.kill(role)
        assert not again.done(), "too late to disturb anything"
        wait_until(lambda: not healthy.is_ready(), within_s=10.0, what="the gateway has noticed")
        healthy.restart(role)
        assert again.result()[0] == expected
