"""Stopping rules, each alone and where two of them meet."""

import pytest

from engine.stopping import finish_reason, stop_ids
from kvtransfer.request_parts import EndReason, SamplingParams
from tests.engine.made_requests import request_with

EOS = frozenset({2, 3})


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([5], {}, None),
        ([2], {}, EndReason.STOP),
        ([5, 3], {}, EndReason.STOP),
        ([2, 5], {}, None),  # only the last token counts
        ([2], {"ignore_eos": True}, None),
        ([7], {"stop_token_ids": (7, 9)}, EndReason.STOP),
        ([7], {"stop_token_ids": (7, 9), "ignore_eos": True}, EndReason.STOP),
        ([2], {"stop_token_ids": (2,), "ignore_eos": True}, EndReason.STOP),
        ([2], {"min_tokens": 2}, None),
        ([5, 2], {"min_tokens": 2}, EndReason.STOP),
        ([7], {"min_tokens": 2, "stop_token_ids": (7,)}, None),
        ([5] * 7, {}, None),
        ([5] * 8, {}, EndReason.LENGTH),
        ([5] * 7 + [2], {}, EndReason.STOP),
        ([2] * 8, {"min_tokens": 9}, EndReason.LENGTH),
        ([5], {"max_tokens": 1}, EndReason.LENGTH),
        ([2], {"max_tokens": 1}, EndReason.STOP),
    ],
)
def test_the_reason_for_each_rule(output, sampling, expected):
    assert finish_reason(request_with(output, **sampling), EOS, max_model_len=100) is expected


@pytest.mark.parametrize(("num_output", "expected"), [(1, None), (2, EndReason.LENGTH), (3, EndReason.LENGTH)], ids=str)
def test_the_model_length_counts_prompt_and_output(num_output, expected):
    assert finish_reason(request_with([5] * num_output), EOS, max_model_len=5) is expected


def test_stop_ids_unite_the_request_and_the_model():
    assert stop_ids(SamplingParams(max_tokens=1, seed=0, stop_token_ids=(7,)), EOS) == {2, 3, 7}
    assert stop_ids(SamplingParams(max_tokens=1, seed=0, stop_token_ids=(7,), ignore_eos=True), EOS) == {7}
