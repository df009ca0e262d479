"""Bias, early stops and penalties against a slow twin in plain Python."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.sampler import Sampler
from tests.engine.made_requests import request_with

EOS = frozenset({2, 3})
CPU = torch.device("cpu")


def sample_one(logits, **request):
    row = torch.tensor([logits], dtype=torch.float32)
    return Sampler(len(logits), EOS, CPU)(row, [request_with(temperature=0.0, **request)])[0]


def edited(logits, request):
    """bias, early stops, repetition, presence and frequency in plain Python."""
    sampling, output = request.sampling, request.output_token_ids
    logits = list(logits)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if len(output) < sampling.min_tokens:
        for token in set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOS):
            logits[token] = -math.inf
    for token in set(request.prompt_token_ids) | set(output):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return logits


LOGITS = [0.5, 4.0, 3.5, 3.0, 2.0, -1.0, 1.0, -3.0]


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, 1),
        ({"logit_bias": {7: 8.0}}, 7),
        ({"logit_bias": {1: -100.0}}, 2),
        ({"logit_bias": {1: -100.0}, "min_tokens": 1}, 4),  # 2 and 3 are EOS ids
        ({"logit_bias": {1: -100.0}, "min_tokens": 1, "ignore_eos": True}, 2),
        ({"logit_bias": {1: -100.0}, "min_tokens": 1, "output": [6]}, 2),
        ({"min_tokens": 1, "stop_token_ids": (1,)}, 4),
        ({"logit_bias": {2: 100.0}, "min_tokens": 1}, 1),  # no bias lifts the mask
        ({"prompt": [1], "repetition_penalty": 2.0}, 2),
        ({"output": [1, 2], "repetition_penalty": 2.0}, 3),
        ({"output": [1], "presence_penalty": 0.4}, 1),
        ({"output": [1], "presence_penalty": 0.6}, 2),
        ({"output": [1, 1, 1], "frequency_penalty": 0.15}, 1),
        ({"output": [1, 1, 1], "frequency_penalty": 0.2}, 2),
        ({"prompt": [1], "presence_penalty": 2.0, "frequency_penalty": 2.0}, 1),  # the prompt does not count
        ({"output": [4], "presence_penalty": -2.0, "frequency_penalty": -1.0}, 4),
    ],
)
def test_what_each_edit_makes_greedy_choose(request_fields, expected):
    assert sample_one(LOGITS, **request_fields) == expected


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty():
    assert sample_one([-1.0, -1.5], prompt=[0], repetition_penalty=2.0) == 1


ids = st.integers(0, 7)
edits = st.fixed_dictionaries(
    {
        "prompt": st.lists(ids, min_size=1, max_size=6),
        "output": st.lists(ids, max_size=6),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(ids, max_size=2).map(tuple),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -1.5, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.3, 0.2]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.floats(-20, 20), min_size=8, max_size=8), edits), min_size=1, max_size=4))
def test_edits_equal_the_slow_twin(rows):
    requests = [request_with(temperature=0.0, **fields) for _, fields in rows]
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    ours = Sampler(8, EOS, CPU)._edit(logits, requests)
    twin = torch.tensor([edited(row, request) for row, request in zip(logits.tolist(), requests, strict=True)])
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-4)


def test_counts_catch_up_from_step_to_step():
    sampler, request = Sampler(8, EOS, CPU), request_with(temperature=0.0, frequency_penalty=0.3)
    drawn = []
    for _ in range(6):
        request.output_token_ids.extend(sampler(torch.tensor([LOGITS]), [request]))
        drawn.append(request.output_token_ids[-1])
    slow, replay = [], request_with(temperature=0.0, frequency_penalty=0.3)
    for _ in range(6):
        logits = edited(LOGITS, replay)
        replay.output_token_ids.append(logits.index(max(logits)))
        slow.append(replay.output_token_ids[-1])
    assert drawn == slow
    assert len(set(drawn)) > 1
