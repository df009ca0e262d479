"""Choices of a prompt that are computed together give the tokens of requests by themselves: float32, token for token,
through real schedulers, runner and pools."""

import random

import pytest
from msgspec import structs

from kvtransfer.request_parts import RequestSpec, SamplingParams, Sibling
from tests.engine.two_roles import TwoRoles

NUM_CHOICES = 4
ROOMY = 200
SAMPLINGS = [
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module")
def two_roles(tiny_checkpoint):
    return TwoRoles(tiny_checkpoint("llama3"))


def group_of(num_prompt: int, max_tokens: int = 24, ignore_eos: bool = True, **sampling) -> list[RequestSpec]:
    """Decode's blocks have 8 tokens: a prompt of 30 leaves the last one partly filled, one of 32 does not."""
    dice = random.Random(num_prompt)
    prompt = tuple(dice.randrange(5, 300) for _ in range(num_prompt))
    params = SamplingParams(max_tokens=max_tokens, seed=11, ignore_eos=ignore_eos, **sampling)
    leader = RequestSpec("r", 0, prompt, params)
    return [leader, *(Sibling(f"r.{index}", index).spec(leader) for index in range(1, NUM_CHOICES))]


def alone(two_roles, specs) -> list[list[int]]:
    return [
        two_roles.run(structs.replace(spec, request_id=f"alone-{index}")).token_ids for index, spec in enumerate(specs)
    ]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 30, 32])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_group_draws_what_its_members_draw_alone(two_roles, sampling, num_prompt, local):
    specs = group_of(num_prompt, **sampling)
    together = two_roles.run_group(specs, ROOMY, local=local)
    assert together.token_ids == alone(two_roles, specs)
    assert len({tuple(tokens) for tokens in together.token_ids}) == NUM_CHOICES
    assert together.num_preemptions == 0


@pytest.mark.parametrize("local", [False, True])
def test_losing_blocks_to_each_other_changes_no_token(two_roles, local):
    specs = group_of(30, temperature=0.9)
    together = two_roles.run_group(specs, 9, local=local)
    assert together.num_preemptions > 0
    assert together.token_ids == alone(two_roles, specs)


def test_without_a_temperature_all_choices_are_one(two_roles):
    specs = group_of(30, temperature=0.0)
    together = two_roles.run_group(specs, ROOMY)
    assert together.token_ids == [alone(two_roles, specs[:1])[0]] * NUM_CHOICES
