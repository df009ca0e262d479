"""The server's answers and those of `engine.offline.LLM` are the same: greedy, and drawn with equal seeds."""

import pytest

from engine.offline import LLM, SamplingParams
from tests.e2e.client import complete
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import ReferenceModel, torch_threads
from tests.tiny_models import VOCAB_SIZE

FEW = [prompt for prompt in PROMPTS if prompt.name in ("english fact", "polish", "emoji", "python", "whitespace")]


@pytest.fixture(scope="module")
def small(smollm2):
    with torch_threads(1), LLM(smollm2, dtype="float32", device="cpu", kv_cache_gib=0.5) as llm:
        yield llm


def test_greedy_tokens_are_transformers(small, smollm2):
    with torch_threads(1):
        model = ReferenceModel(smollm2)
        references = [model.generate(model.tokenizer.encode(p.text), p.max_tokens) for p in FEW]
        params = [SamplingParams(max_tokens=prompt.max_tokens, temperature=0) for prompt in FEW]
        outputs = small.generate([prompt.text for prompt in FEW], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [each.token_ids for each in references]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}])
@pytest.mark.parametrize("mode", ["disaggregated", "local"])
def test_answers_are_the_servers(small, cluster, fields, mode):
    cluster.http.headers["X-KVSplice-Mode"] = mode
    try:
        served = [complete(cluster.http, prompt.text, max_tokens=prompt.max_tokens, **fields) for prompt in FEW]
    finally:
        del cluster.http.headers["X-KVSplice-Mode"]
    with torch_threads(1):
        params = [SamplingParams(max_tokens=prompt.max_tokens, **fields) for prompt in FEW]
        outputs = small.generate([prompt.text for prompt in FEW], params, use_tqdm=False)
    for answer, output in zip(served, outputs, strict=True):
        (choice,) = output.outputs
        assert (choice.text, choice.finish_reason) == (answer.text, answer.finish_reason)
        assert answer.usage["completion_tokens"] == len(choice.token_ids)


def test_stops_and_penalties_are_the_servers(small, cluster):
    fields = {
        "max_tokens": 40,
        "temperature": 0.9,
        "seed": 3,
        "stop": [" the", "."],
        "min_tokens": 4,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {str(VOCAB_SIZE): -5},
        "include_stop_str_in_output": True,
    }
    answer = complete(cluster.http, FEW[0].text, **fields)
    with torch_threads(1):
        (output,) = small.generate(FEW[0].text, SamplingParams.of(fields), use_tqdm=False)
    assert output.outputs[0].text == answer.text
    assert output.outputs[0].finish_reason == answer.finish_reason == "stop"
