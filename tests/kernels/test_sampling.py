"""The native sampling kernels give the bits of plain torch, and both what their contract says."""

import math

import pytest
import torch

from kernels.cpu import sampling as native_sampling
from kernels.sampling import ONE, TorchSampling, token_noise
from tests.kernels.cpu_builds import BUILDS, cpu_kernels

TWIN = TorchSampling()
EVERY_BUILD = pytest.mark.parametrize("build", BUILDS)
SIZES = (1, 7, 8, 15, 17, 1023, 1024, 1025, 5000, 49152)
NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def check_greatest(kernels, logits):
    (values, ids), (expected, expected_ids) = kernels.greatest(logits), TWIN.greatest(logits)
    assert ids.tolist() == expected_ids.tolist()
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))


@EVERY_BUILD
@pytest.mark.parametrize("size", SIZES)
def test_greatest(size, build):
    kernels, generator = cpu_kernels(build).sampling, torch.Generator().manual_seed(size)
    for scale in (1.0, 1e30):
        check_greatest(kernels, torch.randn(5, size, generator=generator) * scale)
    few_values = torch.randint(-3, 3, (20, size), generator=generator).float()
    (values, ids) = kernels.greatest(few_values)
    first = [row.index(max(row)) for row in few_values.tolist()]
    assert ids.tolist() == first
    assert values.tolist() == [max(row) for row in few_values.tolist()]


@EVERY_BUILD
def test_greatest_of_what_is_no_number(build):
    kernels = cpu_kernels(build).sampling
    for size in (3, 40, 3000):
        logits = torch.zeros(6, size)
        logits[0, :], logits[1, :], logits[2, -1], logits[3, 1:] = -INF, NAN, NAN, NAN
        logits[4, size // 2], logits[5, 0] = INF, -INF
        check_greatest(kernels, logits)


def check_weights(kernels, logits, temperature):
    peaks = logits.amax(dim=-1)
    temperatures = torch.full((len(logits), 1), temperature, dtype=torch.float64)
    weights, expected = (which.token_weights(logits, peaks, temperatures) for which in (kernels, TWIN))
    assert torch.equal(weights, expected)
    return weights


@EVERY_BUILD
@pytest.mark.parametrize("temperature", [5e-324, 1e-6, 0.1, 0.7, 1.0, 1.3, 2.0, 100.0, 1e4])
def test_weights_are_the_twins(temperature, build):
    kernels, generator = cpu_kernels(build).sampling, torch.Generator().manual_seed(0)
    for size in (1, 9, 1000, 49152):
        for spread in (0.01, 3.0, 30.0):
            weights = check_weights(kernels, torch.randn(3, size, generator=generator) * spread, temperature)
            assert weights.amax(dim=-1).tolist() == [ONE] * 3


@EVERY_BUILD
def test_weights_about_whole_numbers(build):
    """Logits made so that weights fall on and beside integers, where any error of the exp shows."""
    wanted = torch.cat((torch.arange(1, 3000), torch.logspace(3, 12, 2000, dtype=torch.float64).floor()))
    logits = torch.cat((torch.zeros(1), torch.log(wanted.double() / ONE).clamp(max=0).float())).unsqueeze(0)
    for shift in (0.0, 5.0, -3.25):
        check_weights(cpu_kernels(build).sampling, logits + shift, 1.0)
    check_weights(cpu_kernels(build).sampling, torch.linspace(-27.8, 0, 40_001).unsqueeze(0), 1.0)


@EVERY_BUILD
def test_weights_of_masked_tokens_and_rows(build):
    logits = torch.tensor([[-INF] * 10, [0.0, -INF] * 5, [3e38, -3e38] * 5])
    weights = check_weights(cpu_kernels(build).sampling, logits, 1.0)
    assert weights.tolist() == [[0] * 10, [ONE, 0] * 5, [ONE, 0] * 5]


def test_doubtful_weights_are_computed_by_torch(monkeypatch):
    """Doubts exist, and taking torch's word in all of them is what makes the weights equal: also when there is no room
    to list them."""
    calls = []
    exact = native_sampling.exact_weights
    monkeypatch.setattr(native_sampling, "exact_weights", lambda *args: calls.append(args[0].numel()) or exact(*args))
    kernels = cpu_kernels("native").sampling
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(1))
    check_weights(kernels, logits, 3.0)
    assert 0 < sum(calls) < 4 * 200
    calls.clear()
    check_weights(kernels, logits, 1e4)
    assert sum(calls) >= 4 * 100
    monkeypatch.setattr(native_sampling, "_ROOM", 2)
    calls.clear()
    check_weights(kernels, logits, 1e4)
    assert calls == [49152] * 4


def some_keys(count, seed):
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count, 1), generator=torch.Generator().manual_seed(seed))


@EVERY_BUILD
@pytest.mark.parametrize("size", SIZES)
def test_race(size, build):
    kernels, generator = cpu_kernels(build).sampling, torch.Generator().manual_seed(size)
    weights = torch.randint(0, ONE, (40, size), generator=generator)
    weights[10:] = (torch.randn(30, size, generator=generator).mul(8).clamp(-27, 0).exp() * ONE).long()
    weights[:, torch.rand(size, generator=generator) < 0.5] = 0
    weights[3] = 0
    keys, otherwise = some_keys(40, size), torch.arange(40)
    keys[0], keys[1], keys[2] = 0, -1, 1 << 62
    ids = kernels.race(weights, keys, otherwise)
    assert torch.equal(ids, TWIN.race(weights, keys, otherwise))
    assert ids[3] == 3
    total = weights.sum(dim=-1)
    assert all(weights[row, ids[row]] > 0 for row in range(40) if total[row] > 0)


@EVERY_BUILD
def test_a_race_that_two_tokens_win_at_once_is_left_to_torch(build, monkeypatch):
    """Weights made in proportion to the noise: all tokens arrive within 1e-15 of each other."""
    kernels = cpu_kernels(build).sampling
    keys, otherwise = some_keys(20, 0), torch.full((20,), 7)
    weights = (-torch.log1p(-token_noise(keys, 33)) * (1 << 45)).long()
    weights[1] = torch.eye(33)[5].long()
    asked = []
    race = kernels._twin.race
    monkeypatch.setattr(kernels._twin, "race", lambda *args: asked.append(len(args[0])) or race(*args))
    assert torch.equal(kernels.race(weights, keys, otherwise), TWIN.race(weights, keys, otherwise))
    assert asked == [19]


def test_the_noise_is_splitmix64():
    """The first numbers from key 1234567, as by the paper's reference code."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    noise = token_noise(torch.tensor([[1234567]]), 4).tolist()[0]
    assert noise == [((number >> 12) + 0.5) / (1 << 52) for number in wanted]


def test_noise_fills_ten_bins_evenly_for_any_key_and_stays_off_the_ends():
    noise = token_noise(torch.arange(2000).unsqueeze(1), 500)
    assert noise.min() > 0
    assert noise.max() < 1
    for some in (noise.flatten(), noise[0], noise[:, 0], noise[:, 499]):
        counts = torch.histc(some.float(), 10, 0.0, 1.0)
        expected = len(some) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 27.88  # 9 degrees of freedom, p = 0.001


def test_bits_do_not_depend_on_threads():
    kernels, before = cpu_kernels("native").sampling, torch.get_num_threads()
    logits = torch.randn(7, 49152, generator=torch.Generator().manual_seed(2))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            check_greatest(kernels, logits)
            check_weights(kernels, logits, 0.8)
    finally:
        torch.set_num_threads(before)
