"""The worker's own validation: what is refused, and that the message names both numbers."""

import math

import pytest

from engine.admission import check_group, check_spec
from engine.errors import RejectedError
from kvtransfer.request_parts import MAX_PROMPT_LOGPROBS, Grammar, GrammarKind, RequestSpec, SamplingParams, Sibling


def spec_with(num_prompt=4, resumed=(), **sampling):
    params = SamplingParams(**{"max_tokens": 6, "seed": 0, **sampling})
    return RequestSpec("r", 0, tuple(range(num_prompt)), params, tuple(resumed))


def check(spec, *, vocab_size=100, max_model_len=32, pool_tokens=64, **more):
    check_spec(spec, vocab_size=vocab_size, max_model_len=max_model_len, pool_tokens=pool_tokens, **more)


def test_what_just_fits_is_taken():
    check(spec_with(num_prompt=26))
    check(spec_with(num_prompt=31, max_tokens=1))
    check(spec_with(), pool_tokens=9)
    check(spec_with(num_prompt=20), pool_tokens=20, holds_output=False)
    check(spec_with(num_prompt=17, resumed=(1, 2, 3)), pool_tokens=20, holds_output=False)
    check(spec_with(num_prompt=26, resumed=(1, 2, 3, 4, 5)), pool_tokens=31)
    check(spec_with(num_prompt=4, logit_bias={99: 1.0}, stop_token_ids=(0, 99), min_tokens=6))


def test_log_probabilities_of_a_prompt_are_bounded():
    roomy = {"max_model_len": MAX_PROMPT_LOGPROBS, "pool_tokens": MAX_PROMPT_LOGPROBS, "vocab_size": 1 << 20}
    most = MAX_PROMPT_LOGPROBS // 21
    check(spec_with(num_prompt=most, num_prompt_logprobs=20), **roomy)
    with pytest.raises(RejectedError, match=f"{most + 1} prompt tokens, each with 20 .* {MAX_PROMPT_LOGPROBS}"):
        check(spec_with(num_prompt=most + 1, num_prompt_logprobs=20), **roomy)
    check(spec_with(num_prompt=most + 1, num_prompt_logprobs=19, num_logprobs=20), **roomy)


@pytest.mark.parametrize(
    ("num_prompt", "sampling", "limits", "parts"),
    [
        (32, {}, {}, ("32 tokens", "31", "32")),
        (27, {}, {}, ("27", "6", "33", "32")),
        (4, {}, {"pool_tokens": 8}, ("9 tokens", "holds 8")),
        (21, {}, {"pool_tokens": 20, "holds_output": False}, ("21 tokens", "holds 20")),
        (18, {"resumed": (1, 2, 3)}, {"pool_tokens": 20, "holds_output": False}, ("21 tokens", "holds 20")),
        (4, {"resumed": (1,) * 6}, {}, ("6 output tokens", "max_tokens is 6")),
        (4, {"resumed": (1, 100)}, {}, ("the output", "id 100", "100 tokens")),
        (4, {}, {"vocab_size": 3}, ("the prompt", "id 3", "3 tokens")),
        (4, {"logit_bias": {1: 0.5, 100: 0.5}}, {}, ("logit_bias", "id 100", "100 tokens")),
        (4, {"stop_token_ids": (5, 101)}, {}, ("stop_token_ids", "id 101", "100 tokens")),
        (4, {"stop_token_ids": (-1,)}, {}, ("stop_token_ids", "id -1")),
        (4, {"allowed_token_ids": (5, 100)}, {}, ("allowed_token_ids", "id 100", "100 tokens")),
        (4, {"bad_words": ((5,), (1, 100))}, {}, ("bad_words", "id 100", "100 tokens")),
        (4, {"grammar": Grammar(GrammarKind.REGEX, "a", ""), "ignore_eos": True}, {}, ("ignore_eos", "grammar")),
        (4, {"min_tokens": 7}, {}, ("min_tokens is 7", "max_tokens", "6")),
    ],
)
def test_refusals_name_both_numbers(num_prompt, sampling, limits, parts):
    with pytest.raises(RejectedError) as caught:
        check(spec_with(num_prompt, **sampling), **limits)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_floats_are_finite(name, value):
    with pytest.raises(RejectedError, match=f"{name} is .*not a finite number"):
        check(spec_with(**{name: value}))


def test_biases_are_finite():
    with pytest.raises(RejectedError, match="logit_bias of token 7 is nan"):
        check(spec_with(logit_bias={6: 1.0, 7: math.nan}))


def test_a_group_is_of_different_requests_that_can_run_together():
    leader = spec_with()
    others = [Sibling(f"s{index}", index).spec(leader) for index in range(1, 4)]
    assert [spec.sampling.choice_index for spec in others] == [1, 2, 3]
    check_group([leader], max_members=1)
    check_group([leader, *others], max_members=4)
    with pytest.raises(RejectedError, match="4 choices in one group, but 3"):
        check_group([leader, *others], max_members=3)
    with pytest.raises(RejectedError, match="same id"):
        check_group([leader, *others, leader], max_members=8)
