"""A request that is resumed behind any of its tokens goes on as if it had never been disturbed: float32, token for
token, through both schedulers and runners."""

import pytest
from msgspec.structs import replace

from kvtransfer.request_parts import EndReason, RequestSpec, SamplingParams
from tests.engine.two_roles import TwoRoles

PROMPT = tuple(5 + i * 7 % 300 for i in range(21))
MAX_TOKENS = 24
CUTS = (1, 2, 7, 15, 16, 22, 23)
"""Tokens that the first attempt has generated when it is lost; prompt and these end inside, before and at a block."""


@pytest.fixture(scope="module")
def two_roles(tiny_checkpoint):
    return TwoRoles(tiny_checkpoint("llama3"))


def spec_of(**sampling) -> RequestSpec:
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 7, "ignore_eos": True, **sampling})
    return RequestSpec("r", 0, PROMPT, params)


def resumed(spec: RequestSpec, tokens: list[int]) -> RequestSpec:
    return replace(spec, attempt=spec.attempt + 1, output_token_ids=tuple(tokens))


SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "filtered": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "another choice": {"temperature": 0.8, "choice_index": 3},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "counts": {"temperature": 0.0, "presence_penalty": -0.5, "frequency_penalty": -0.4},
    "all penalties, seeded": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": {9: 2.0},
    },
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_follows_is_the_same(two_roles, name, cut):
    spec = spec_of(**SAMPLINGS[name])
    whole = two_roles.run(spec)
    assert (len(whole.token_ids), whole.reason) == (MAX_TOKENS, EndReason.LENGTH)
    rest = two_roles.run(resumed(spec, whole.token_ids[:cut]))
    assert (rest.token_ids, rest.reason) == (whole.token_ids[cut:], EndReason.LENGTH)


def test_several_attempts_make_one_sequence(two_roles):
    spec = spec_of(temperature=0.8)
    whole = two_roles.run(spec).token_ids
    for cut in (3, 9, 20):
        spec = resumed(spec, whole[:cut])
    assert (spec.attempt, two_roles.run(spec).token_ids) == (3, whole[20:])


def test_the_cases_differ_and_so_prove_something(two_roles):
    """The control: penalties and draws do change the tokens, and so does an output that is taken for prompt."""
    outputs = {name: tuple(two_roles.run(spec_of(**params)).token_ids) for name, params in SAMPLINGS.items()}
    assert len(set(outputs.values())) == len(SAMPLINGS)
    for name in ("seeded", "counts"):
        spec, whole = spec_of(**SAMPLINGS[name]), list(outputs[name])
        cut = 12
        wrong = replace(
            spec,
            prompt_token_ids=PROMPT + tuple(whole[:cut]),
            sampling=replace(spec.sampling, max_tokens=MAX_TOKENS - cut),
        )
        assert two_roles.run(wrong).token_ids != whole[cut:]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_stop_rules_count_all_output(two_roles, cut):
    """A stop id ends the request at its first place from min_tokens on, wherever the attempts are cut."""
    free = two_roles.run(spec_of(temperature=0.8)).token_ids
    stop = next(token for token in free[10:] if token not in free[:10])
    early = two_roles.run(spec_of(temperature=0.8, stop_token_ids=(stop,)))
    assert early.reason is EndReason.STOP
    assert early.token_ids == free[: free.index(stop) + 1]
    late = spec_of(temperature=0.8, stop_token_ids=(stop,), min_tokens=len(early.token_ids) + 2)
    for spec in (spec_of(temperature=0.8, stop_token_ids=(stop,)), late):
        whole = two_roles.run(spec)
        rest = two_roles.run(resumed(spec, whole.token_ids[:cut]))
        assert (rest.token_ids, rest.reason) == (whole.token_ids[cut:], whole.reason)
    assert len(two_roles.run(late).token_ids) > len(early.token_ids), "min_tokens masks the stop id"
