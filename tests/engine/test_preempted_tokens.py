"""Requests that lose their blocks to each other, and share them, give the tokens of an undisturbed run: float32, token
for token, through the real scheduler, runner and pool."""

import random

import pytest

from kvtransfer.request_parts import RequestSpec, SamplingParams
from tests.engine.two_roles import TwoRoles

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.3},
]
ROOMY, TIGHT = 200, 11
"""Blocks of 8 tokens: room for all at once, and for little more than the longest one."""
SOME = 4
"""Blocks on the host for some of those that lose theirs."""


@pytest.fixture(scope="module")
def two_roles(tiny_checkpoint):
    return TwoRoles(tiny_checkpoint("llama3"))


def specs_of(dice: random.Random, num_requests: int = 7) -> list[RequestSpec]:
    """Prompts with a common beginning of some length, and all kinds of sampling."""
    common = [dice.randrange(5, 300) for _ in range(30)]
    specs = []
    for number in range(num_requests):
        prompt = common[: dice.randrange(30)] + [dice.randrange(5, 300) for _ in range(dice.randint(1, 12))]
        params = SamplingParams(max_tokens=dice.randint(4, 40), seed=number, ignore_eos=True, **dice.choice(SAMPLINGS))
        specs.append(RequestSpec(f"r{number}", 0, tuple(prompt), params))
    return specs


@pytest.mark.parametrize("seed", range(4))
def test_preemption_and_sharing_change_no_token(two_roles, seed):
    specs = specs_of(random.Random(seed))
    plain = two_roles.run_together(specs, ROOMY, share_prefixes=False)
    assert (plain.num_preemptions, plain.num_cached) == (0, 0)
    shared = two_roles.run_together(specs, ROOMY)
    assert shared.token_ids == plain.token_ids
    assert shared.num_cached > 0
    tight = two_roles.run_together(specs, TIGHT, share_prefixes=False)
    assert tight.token_ids == plain.token_ids
    assert tight.num_preemptions > 0
    both = two_roles.run_together(specs, TIGHT)
    assert both.token_ids == plain.token_ids
    assert both.num_cached > 0


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_swapping_changes_no_token(two_roles, share_prefixes):
    """Its slow twin is what computes all of it again."""
    counts = [0, 0, 0]
    for seed in range(6):
        specs = specs_of(random.Random(seed))
        recomputed = two_roles.run_together(specs, TIGHT, share_prefixes=share_prefixes)
        swapped = two_roles.run_together(specs, TIGHT, share_prefixes=share_prefixes, swap_blocks=ROOMY)
        assert swapped.token_ids == recomputed.token_ids
        assert (recomputed.load.swap.num_out, swapped.load.swap.num_refused) == (0, 0)
        found = (recomputed.num_preemptions, swapped.load.swap.num_out, swapped.load.swap.num_in)
        counts = [count + more for count, more in zip(counts, found, strict=True)]
    assert min(counts) > 0
    assert (counts[2] == counts[1]) != share_prefixes, "what the prefix cache still has is not copied back"


def test_some_swapped_and_some_computed_again_change_no_token(two_roles):
    counts = [0, 0]
    for seed in range(4):
        specs = specs_of(random.Random(seed))
        plain = two_roles.run_together(specs, ROOMY, share_prefixes=False)
        mixed = two_roles.run_together(specs, TIGHT, swap_blocks=SOME)
        assert mixed.token_ids == plain.token_ids
        counts = [counts[0] + mixed.load.swap.num_in, counts[1] + mixed.load.swap.num_refused]
    assert min(counts) > 0
