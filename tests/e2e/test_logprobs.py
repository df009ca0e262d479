"""Log probabilities through HTTP against transformers in float32: of each output token, prefill's first one too, and of
whole prompts; wherever they are computed, and although the worker that computes them dies."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.client import DONE, body_of
from tests.e2e.cluster import DECODE, MODEL_NAME, PREFILL
from tests.e2e.processes import wait_until
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import torch_threads
from tests.e2e.streaming import Streaming

HEADER = "X-KVSplice-Mode"
BOUND = 1e-4
NUM_TOP = 3
NUM_TOKENS = 12
NAMES = ("english fact", "polish", "emoji", "python")


class Truth:
    """What transformers makes of a sequence of tokens: log probabilities of each next one, [tokens, vocabulary]."""

    def __init__(self, folder) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def of(self, token_ids):
        with torch_threads(1), torch.inference_mode():
            return self._model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def truth(smollm2):
    return Truth(smollm2)


def call(cluster, mode, **fields):
    response = cluster.http.post("/v1/completions", json=fields, headers={HEADER: mode})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == mode
    return response.json()


def ids_told(logprobs) -> list[int]:
    return [int(name.removeprefix("token_id:")) for name in logprobs["tokens"]]


def check(logprobs, rows, start=0) -> None:
    """`rows[i]` are the log probabilities of what may stand at token i; the first `start` tokens have none."""
    for place, token_id in enumerate(ids_told(logprobs)):
        if place < start:
            assert (logprobs["token_logprobs"][place], logprobs["top_logprobs"][place]) == (None, None)
            continue
        row = rows[place - start]
        assert logprobs["token_logprobs"][place] == pytest.approx(row[token_id].item(), abs=BOUND)
        top = {int(name.removeprefix("token_id:")): value for name, value in logprobs["top_logprobs"][place].items()}
        assert NUM_TOP <= len(top) <= NUM_TOP + 1
        for found, value in top.items():
            assert value == pytest.approx(row[found].item(), abs=BOUND)
        best = sorted(top.values(), reverse=True)[:NUM_TOP]
        assert best == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=BOUND)


@pytest.mark.parametrize("mode", ["disaggregated", "local"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "logit_bias": {"198": -5}}])
def test_outputs(cluster, truth, mode, sampling):
    for prompt in [prompt for prompt in PROMPTS if prompt.name in NAMES]:
        ids = truth.tokenizer.encode(prompt.text, add_special_tokens=False)
        fields = {"ignore_eos": True, "logprobs": NUM_TOP, "return_tokens_as_token_ids": True, **sampling}
        answer = call(cluster, mode, **body_of(ids, max_tokens=NUM_TOKENS, **fields))
        logprobs = answer["choices"][0]["logprobs"]
        output = ids_told(logprobs)
        assert len(output) == answer["usage"]["completion_tokens"] == NUM_TOKENS
        check(logprobs, truth.of([*ids, *output])[len(ids) - 1 :])
    cluster.wait_pools_empty()


@pytest.mark.parametrize("mode", ["disaggregated", "local"])
def test_prompts(small_chunk_cluster, truth, mode):
    """Of 150 tokens, in chunks of 64 on prefill; asked twice, so that the second time a cache could be in the way."""
    text = " ".join(prompt.text for prompt in PROMPTS if prompt.name in NAMES) * 2
    ids = truth.tokenizer.encode(text, add_special_tokens=False)[:150]
    rows = truth.of(ids)
    for _ in range(2):
        fields = {"echo": True, "logprobs": NUM_TOP, "return_tokens_as_token_ids": True, "prompt_logprobs": NUM_TOP}
        answer = call(small_chunk_cluster, mode, **body_of(ids, max_tokens=0, **fields))
        choice = answer["choices"][0]
        assert ids_told(choice["logprobs"]) == ids
        check(choice["logprobs"], rows, start=1)
        assert choice["text"] == truth.tokenizer.decode(ids)
        assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert choice["prompt_logprobs"][0] is None
        for place, entry in enumerate(choice["prompt_logprobs"][1:], 1):
            told, row = entry[str(ids[place])], rows[place - 1]
            assert told["logprob"] == pytest.approx(row[ids[place]].item(), abs=BOUND)
            assert told["decoded_token"] == truth.tokenizer.decode([ids[place]])
            near = row[ids[place]] + torch.tensor([BOUND, -BOUND])
            assert int((row > near[0]).sum()) + 1 <= told["rank"] <= int((row > near[1]).sum()) + 1
    small_chunk_cluster.wait_pools_empty()


def test_prompt_and_output_in_one_stream(cluster, truth):
    ids = truth.tokenizer.encode("The capital of France is", add_special_tokens=False)
    fields = {"max_tokens": 4, "echo": True, "logprobs": NUM_TOP, "return_tokens_as_token_ids": True, "stream": True}
    lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    response = cluster.http.post("/v1/completions", json=body_of(ids, **fields))
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                lists[name] += values
    assert response.text.rstrip().endswith(DONE)
    check(lists, truth.of(ids_told(lists)), start=1)
    assert len(lists["tokens"]) == len(ids) + 4
    assert [
        text[offset:].startswith(piece)
        for offset, piece in zip(lists["text_offset"], map(truth.tokenizer.decode, ids_told(lists)), strict=True)
    ] == [True] * (len(ids) + 4)


# --- workers that die --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_truth(tiny_model):
    return Truth(tiny_model)


def gathered(streaming):
    lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for data in streaming._json_events():
        for choice in data.get("choices", ()):
            for name, values in (choice["logprobs"] or {}).items():
                lists[name] += values
    return lists


def test_a_stream_whose_decode_worker_dies_tells_of_each_token_once(healthy, tiny_truth):
    num_tokens, prompt = 600, [10, 11, 12, 13, 14]
    fields = {"temperature": 0.8, "seed": 11, "logprobs": NUM_TOP, "return_tokens_as_token_ids": True}
    with Streaming(healthy, prompt=prompt, max_tokens=num_tokens, ignore_eos=True, **fields) as streaming:
        healthy.kill(DECODE)
        healthy.restart(DECODE)
    assert (streaming.errors, streaming.num_done, streaming.num_tokens) == ([], 1, num_tokens)
    assert healthy.gauge("request_retries_total", reason="decode_lost") >= 1
    lists = gathered(streaming)
    output = ids_told(lists)
    assert len(output) == num_tokens
    check(lists, tiny_truth.of([*prompt, *output])[len(prompt) - 1 :])


def test_a_prompt_whose_prefill_worker_dies_is_told_once(healthy, tiny_truth):
    prompt = [10 + (7 * i + i * i) % 250 for i in range(12000)]
    body = body_of(prompt, max_tokens=2, ignore_eos=True, prompt_logprobs=0, model=MODEL_NAME)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(healthy.http.post, "/v1/completions", json=body)
        wait_until(lambda: healthy.holds_blocks(PREFILL), within_s=10.0, what="the prompt is being computed")
        healthy.kill(PREFILL)
        healthy.restart(PREFILL)
        response = asked.result(timeout=120.0)
    assert response.status_code == 200, response.text
    scores = response.json()["choices"][0]["prompt_logprobs"]
    assert len(scores) == len(prompt)
    assert scores[0] is None
    rows = tiny_truth.of(prompt[:500])
    for place in range(1, 500):
        ((token_id, told),) = scores[place].items()
        assert int(token_id) == prompt[place]
        assert told["logprob"] == pytest.approx(rows[place - 1][prompt[place]].item(), abs=BOUND)
