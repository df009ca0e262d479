"""The keyed noise: what it depends on, and what it does not."""

import hypothesis.strategies as st
from hypothesis import given

from engine.noise import draw_key, noise_key
from kvtransfer.request_parts import RequestSpec, SamplingParams


def key(prompt=(1, 2, 3), *, seed=7, choice_index=0, request_id="r", attempt=0, **sampling):
    params = SamplingParams(max_tokens=4, seed=seed, choice_index=choice_index, **sampling)
    return noise_key(RequestSpec(request_id, attempt, tuple(prompt), params))


def test_each_part_of_the_key_matters():
    keys = [key(), key(seed=8), key(seed=-7), key(choice_index=1), key((1, 2)), key((1, 3, 2)), key((1, 2, 3, 0))]
    assert len(set(keys)) == len(keys)


def test_nothing_else_matters():
    assert key(request_id="another", attempt=3, temperature=0.3, top_k=5) == key()


def test_the_noise_never_changes_between_releases():
    assert key().hex() == "da06131c7bda2f0e414d1a4bc70f3691bc283b2d0af14da605aec77db03aefde"
    assert draw_key(key(), 5) == -2645481851382686549


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40))
def test_each_position_has_its_own_64_bits(some_key, position):
    assert -(1 << 63) <= draw_key(some_key, position) < 1 << 63
    assert draw_key(some_key, position) != draw_key(some_key, position + 1)
