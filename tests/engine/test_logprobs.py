"""Log probabilities against a slow twin in plain Python, and of whole prompts against transformers in float32."""

import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import AutoModelForCausalLM

from engine import logprobs as logprobs_module
from engine.loading import load
from engine.logprobs import likelihood_keys, token_logprobs
from engine.request import Request, ScheduledRow
from kvtransfer.request_parts import MAX_LOGPROBS, MIN_LOGPROB, RequestSpec, SamplingParams
from tests.engine.greedy_loop import make_runner
from tests.tiny_models import VOCAB_SIZE

BOUND = 1e-4
"""What float32 sums in another order may differ by."""
NEVER = -math.inf


def slow(row, token_id, num_top):
    """(logprob, rank, top) of one row of Python floats."""
    row = [NEVER if math.isnan(logit) else logit for logit in row]
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    peak = row[order[0]]
    if peak == NEVER:
        told = [MIN_LOGPROB] * len(row)
    else:
        total = peak + math.log(math.fsum(math.exp(logit - peak) for logit in row))
        told = [max(MIN_LOGPROB, logit - total) for logit in row]
    return told[token_id], order.index(token_id) + 1, [(token, told[token]) for token in order[:num_top]]


def check(found, row, token_id, num_top):
    logprob, rank, top = slow(row, token_id, num_top)
    assert found.rank == rank
    assert [token for token, _ in found.top] == [token for token, _ in top]
    for told, expected in zip(
        [found.logprob, *(value for _, value in found.top)], [logprob, *(v for _, v in top)], strict=True
    ):
        assert told == pytest.approx(expected, abs=BOUND)
        assert MIN_LOGPROB <= told <= 0.0


LOGITS = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.5, 1.5, NEVER, math.nan, -1e-40, 1e-40]))
ROWS = st.integers(1, 12).flatmap(
    lambda size: st.lists(
        st.tuples(
            st.lists(LOGITS, min_size=size, max_size=size), st.integers(0, size - 1), st.integers(0, MAX_LOGPROBS)
        ),
        min_size=1,
        max_size=5,
    )
)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_they_are_what_the_slow_twin_says(rows):
    logits = torch.tensor([row for row, _, _ in rows], dtype=torch.float32)
    before = logits.clone()
    found = token_logprobs(logits, [token for _, token, _ in rows], [count for _, _, count in rows])
    assert torch.equal(logits.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0)), "logits are the sampler's too"
    for told, (_, token_id, num_top), row in zip(found, rows, before.tolist(), strict=True):
        check(told, row, token_id, num_top)


def test_an_infinite_logit_takes_it_all():
    (found,) = token_logprobs(torch.tensor([[0.0, math.inf, 1.0]]), [0], [2])
    assert (found.logprob, found.rank) == (MIN_LOGPROB, 3)
    assert found.top[0] == (1, 0.0)


def test_of_equals_the_lower_id_comes_first_however_many_there_are():
    logits = torch.zeros(1, 3000)
    logits[0, 2000:] = 1.0
    (found,) = token_logprobs(logits, [2001], [3])
    assert (found.rank, [token for token, _ in found.top]) == (2, [2000, 2001, 2002])


def test_keys_are_all_different_and_in_the_order_of_the_logits():
    logits = torch.tensor([[0.0, -0.0, 1e-45, -1e-45, 3.0, -3.0, NEVER, 3.4e38, -3.4e38, 0.0]])
    keys = likelihood_keys(logits)[0].tolist()
    assert len(set(keys)) == 10
    assert sorted(range(10), key=keys.__getitem__, reverse=True) == [7, 4, 2, 0, 1, 9, 3, 5, 8, 6]


def test_company_changes_nothing_beyond_the_bound(monkeypatch):
    monkeypatch.setattr(logprobs_module, "ROWS_AT_ONCE", 3)
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(1)) * 5
    token_ids, num_top = list(range(0, 800, 100)), [0, 20, 5, 1, 0, 20, 3, 2]
    together = token_logprobs(logits, token_ids, num_top)
    for index, found in enumerate(together):
        (alone,) = token_logprobs(logits[index : index + 1], token_ids[index : index + 1], num_top[index : index + 1])
        assert (alone.rank, [token for token, _ in alone.top]) == (found.rank, [token for token, _ in found.top])
        assert alone.logprob == pytest.approx(found.logprob, abs=1e-5)


# --- through the model -------------------------------------------------------------------------------

PROMPT = random.Random(3).sample(range(5, VOCAB_SIZE), 70)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Name -> log probabilities [prompt, vocabulary] of transformers."""

    def compute(name):
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(name), dtype=torch.float32)
        with torch.inference_mode():
            return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)

    return compute


def asking(name, prompt, blocks, **sampling) -> Request:
    params = SamplingParams(max_tokens=8, seed=0, temperature=0.0, **sampling)
    return Request(RequestSpec(name, 0, tuple(prompt), params), gateway="g", block_ids=list(blocks))


def run_prompt(runner, request, chunk, beside=()):
    """The prompt in chunks, each beside the rows `beside`; what was told of it, and of the token behind it."""
    told, start = [], 0
    while start < request.num_prompt:
        row = ScheduledRow(request, start, min(chunk, request.num_prompt - start))
        result = runner.step([*beside, row])
        found = result.logprobs.get(len(beside))
        told += found.prompt if found else ()
        request.num_scored += len(found.prompt) if found else 0
        start = row.stop
    return told, found and found.token, result.token_ids[-1]


def check_against(found, truth, token_id, num_top):
    assert found.logprob == pytest.approx(truth[token_id].item(), abs=BOUND)
    assert len(found.top) == num_top
    best = truth.topk(num_top).values.tolist() if num_top else []
    assert [value for _, value in found.top] == pytest.approx(best, abs=BOUND)
    for token, value in found.top:
        assert value == pytest.approx(truth[token].item(), abs=BOUND)


@pytest.mark.parametrize("chunk", [1, 7, 64, 70])
@pytest.mark.parametrize("name", ["llama2", "mistral", "qwen3"])
def test_a_prompt_and_its_next_token_against_transformers(name, chunk, tiny_loaded, expected, monkeypatch):
    monkeypatch.setattr("engine.model.ROWS_AT_ONCE", 16)
    truth = expected(name)
    runner = make_runner(tiny_loaded(name), num_blocks=10, block_size=16)
    company = ScheduledRow(asking("c", PROMPT[:9], [9]), 0, 9)
    request = asking("r", PROMPT, range(5), num_prompt_logprobs=4, num_logprobs=2)
    told, token, token_id = run_prompt(runner, request, chunk, [company])
    assert len(told) == len(PROMPT) - 1
    for place, found in enumerate(told):
        check_against(found, truth[place], PROMPT[place + 1], 4)
    check_against(token, truth[-1], token_id, 2)
    assert (token.rank, token.top[0][0]) == (1, token_id)


def test_what_is_told_already_is_not_told_again(tiny_loaded):
    runner = make_runner(tiny_loaded("llama2"), num_blocks=10, block_size=16)
    request = asking("r", PROMPT, range(5), num_prompt_logprobs=0)
    whole, _, _ = run_prompt(runner, request, 70)
    request.num_scored = 40
    rest, _, _ = run_prompt(runner, request, 33)
    assert len(rest) == 29
    assert [found.logprob for found in rest] == pytest.approx([found.logprob for found in whole[40:]], abs=BOUND)
    request.num_scored = len(PROMPT) - 1
    assert run_prompt(runner, request, 33)[0] == []


def test_who_does_not_ask_is_told_nothing(tiny_loaded):
    runner = make_runner(tiny_loaded("llama2"), num_blocks=10, block_size=16)
    asks = asking("a", PROMPT, range(5), num_logprobs=0)
    result = runner.step([ScheduledRow(asking("b", PROMPT[:20], [5, 6]), 0, 20), ScheduledRow(asks, 0, 70)])
    assert list(result.logprobs) == [1]
    assert result.logprobs[1].token.top == ()
    assert result.logprobs[1].prompt == ()


def test_logprobs_are_of_the_raw_logits(tiny_loaded, expected):
    """Bias and temperature decide about the token, not about what is told of it."""
    runner = make_runner(tiny_loaded("llama2"), num_blocks=10, block_size=16, sample=lambda logits, requests: [77])
    request = asking("r", PROMPT, range(5), num_logprobs=1, logit_bias={77: 100.0})
    result = runner.step([ScheduledRow(request, 0, 70)])
    check_against(result.logprobs[0].token, expected("llama2")[-1], 77, 1)


def test_the_outputs_logits_are_as_without_scores(tiny_loaded):
    """The scored rows go through the output layer apart: nothing of what is sampled from may change."""
    seen = []

    def keep(logits, requests):
        seen.append(logits.clone())
        return [0] * len(requests)

    runner = make_runner(tiny_loaded("qwen2"), num_blocks=10, block_size=16, sample=keep)
    for fields in ({}, {"num_prompt_logprobs": 3}):
        runner.step([ScheduledRow(asking("r", PROMPT, range(5), **fields), 0, 70)])
    assert torch.equal(*seen)


@pytest.mark.parametrize("chunk", [1, 64])
def test_in_bfloat16_a_prompt_s_are_those_of_its_tokens_as_outputs(chunk, tiny_checkpoint, kernels):
    """On the CPU's own kernels the rows go through a packed output layer, one at a time or many."""
    loaded = load(tiny_checkpoint("smollm2"), dtype="bfloat16", device="cpu", kernels=kernels)
    runner = make_runner(loaded, num_blocks=10, block_size=16, sample=lambda logits, requests: [chosen])
    chosen = 0
    scored, _, _ = run_prompt(runner, asking("r", PROMPT, range(5), num_prompt_logprobs=2), chunk)
    for place in (0, 5, 40):
        chosen = PROMPT[place + 1]
        request = asking("o", PROMPT[: place + 1], range(5, 10), num_logprobs=2)
        found = runner.step([ScheduledRow(request, 0, place + 1)]).logprobs[0].token
        assert found.logprob == pytest.approx(scored[place].logprob, abs=0.05)
        assert found.top[0][1] == pytest.approx(scored[place].top[0][1], abs=0.05)
