"""The keyed noise: what it depends on, what it does not, and that it is uniform."""

import hypothesis.strategies as st
from hypothesis import given

from engine.noise import noise_key, uniform
from kvtransfer.messages import RequestSpec, SamplingParams


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
    assert uniform(key(), 5) == 0.8565881414729958


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40))
def test_a_uniform_is_at_least_0_and_below_1(some_key, position):
    assert 0.0 <= uniform(some_key, position) < 1.0
    assert uniform(some_key, position) != uniform(some_key, position + 1)


def test_uniforms_fill_ten_bins_evenly():
    counts = [0] * 10
    for position in range(20_000):
        counts[int(uniform(key(), position) * 10)] += 1
    chi_square = sum((count - 2000) ** 2 / 2000 for count in counts)
    assert chi_square < 27.88  # 9 degrees of freedom, p = 0.001
