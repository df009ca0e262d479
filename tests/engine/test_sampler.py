"""Filters and draws against a slow twin in plain Python; what the sampler promises about batches and broken logits."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine import sampler as sampler_module
from engine.sampler import Sampler, keep_min_p, keep_top
from kernels.sampling import ONE, TorchSampling
from tests.engine.made_requests import request_with

EOS = frozenset({2, 3})
CPU = torch.device("cpu")


def sample_one(logits, **request):
    row = torch.tensor([logits], dtype=torch.float32)
    return Sampler(len(logits), EOS, CPU)(row, [request_with(**request)])[0]


def draw_many(logits, count, **sampling):
    """Draws at positions 0 .. count - 1 of one request, as sets of tokens and as a list."""
    row = torch.tensor([logits], dtype=torch.float32)
    sampler, request = Sampler(len(logits), EOS, CPU), request_with(**sampling)
    drawn = []
    for _ in range(count):
        drawn.append(sampler(row, [request])[0])
        request.output_token_ids.append(0)
    return drawn


# --- the slow twin -----------------------------------------------------------------------------------


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The set of tokens that the filters leave, in plain Python."""
    peak = max(logits)
    mass = [math.exp((logit - peak) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or len(order)]
    total, reached, nucleus = sum(mass[token] for token in order), 0.0, []
    for token in order:
        if nucleus and reached >= top_p * total:
            break
        nucleus.append(token)
        reached += mass[token]
    return {token for token in nucleus if mass[token] >= min_p}


def kept_by_sampler(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = torch.tensor([logits], dtype=torch.float32)
    weights = TorchSampling().token_weights(rows, rows.amax(dim=-1), torch.tensor([[temperature]], dtype=torch.float64))
    weights = keep_top(weights, [top_k or len(logits)], [top_p])
    weights = keep_min_p(weights, torch.tensor([[min_p]], dtype=torch.float64))
    return set(weights[0].nonzero().flatten().tolist())


# --- greedy ------------------------------------------------------------------------------------------


def test_greedy_takes_the_greatest_logit_and_the_lower_id_of_two():
    assert sample_one([0.0, 5.0, 1.0, 5.0], temperature=0.0) == 1


def test_an_empty_batch_is_an_empty_answer():
    assert Sampler(8, EOS, CPU)(torch.empty(0, 8), []) == []


def test_logits_are_not_changed():
    logits = torch.randn(2, 8)
    before = logits.clone()
    requests = [request_with(logit_bias={1: 5.0}, min_tokens=3, repetition_penalty=2.0), request_with(top_k=2)]
    Sampler(8, EOS, CPU)(logits, requests)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    assert draw_many([1.0, 3.0, 2.999, -50.0], 20, temperature=temperature) == [1] * 20


def test_a_huge_temperature_is_uniform():
    assert set(draw_many([1.0, 3.0, 2.0, -5.0], 100, temperature=1e4)) == {0, 1, 2, 3}


# --- filters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),  # 1, 3 and 4 are equal: the lower ids stay
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 4}, {0, 1, 3, 4}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 99}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.24}, {1}),
        ({"top_p": 0.26}, {1, 3}),
        ({"top_p": 0.74}, {1, 3, 4}),
        ({"top_p": 0.76}, {0, 1, 3, 4}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # half of what top_k left
        ({"top_k": 2, "top_p": 0.51}, {1, 3}),
        ({"min_p": 1.0}, {1, 3, 4}),  # all that equal the most likely one
        ({"min_p": 0.49}, {0, 1, 3, 4}),
        ({"min_p": 0.51}, {1, 3, 4}),
        ({"top_k": 2, "min_p": 0.2}, {1, 3}),
    ],
)
def test_the_exact_set_that_filters_leave(filters, expected):
    shares = [4, 8, 2, 8, 8, 2]  # of 32
    logits = [math.log(share) for share in shares]
    assert kept_by_sampler(logits, **filters) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-12, 12).map(lambda third: third / 3), min_size=2, max_size=40),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.97, 0.83, 0.5, 0.11, 0.003]),
    st.sampled_from([0.0, 0.013, 0.21, 0.77]),
)
def test_filters_equal_the_slow_twin(logits, temperature, top_k, top_p, min_p):
    expected = kept(logits, temperature, top_k, top_p, min_p)
    ours = kept_by_sampler(logits, temperature, top_k, top_p, min_p)
    # A mass within rounding of top_p may fall on either side: compare with both neighbours of top_p.
    neighbours = [kept(logits, temperature, top_k, top_p * (1 + nudge), min_p) for nudge in (-1e-9, 1e-9)]
    assert ours in (expected, *neighbours)


def test_a_flat_distribution_needs_more_than_the_candidates(monkeypatch):
    monkeypatch.setattr(sampler_module, "_CANDIDATES", 4)
    logits = [0.0] * 20
    assert kept_by_sampler(logits, top_p=0.5) == set(range(10))
    assert kept_by_sampler(logits, top_k=8, top_p=0.5) == set(range(4))
    assert kept_by_sampler(logits, top_k=15, top_p=0.999) == set(range(15))


def test_rows_of_one_batch_keep_their_own_filters():
    weights = torch.tensor([[1, 4, 2, 1]] * 4)
    left = keep_top(weights, [4, 1, 4, 2], [1.0, 1.0, 0.7, 1.0])
    assert left.tolist() == [[1, 4, 2, 1], [0, 4, 0, 0], [0, 4, 2, 0], [0, 4, 2, 0]]


# --- the draw ----------------------------------------------------------------------------------------


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 40))
def test_a_race_is_never_won_by_a_token_of_weight_0(key, exponent):
    weights = torch.tensor([[0, 1 << exponent, 0, 1, ONE, 0]])
    assert TorchSampling().race(weights, torch.tensor([[key]]), torch.tensor([0])).item() in (1, 3, 4)


def test_an_error_in_the_logits_changes_about_as_many_draws_as_it_is_large():
    """What makes a seed worth something: another batch company leaves errors of 1e-6 in the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator)
    error = torch.randn(20_000, generator=generator) * 1e-3
    drawn, again = (draw_many(row.tolist(), 1000, seed=5) for row in (logits, logits + error))
    assert len(set(drawn)) > 500
    assert sum(a != b for a, b in zip(drawn, again, strict=True)) <= 6


def test_draws_follow_the_distribution():
    probabilities = [0.05, 0.4, 0.15, 0.1, 0.3]
    drawn = draw_many([math.log(p) for p in probabilities], 4000, seed=11)
    expected = [4000 * p for p in probabilities]
    chi_square = sum((drawn.count(t) - e) ** 2 / e for t, e in enumerate(expected))
    assert chi_square < 18.47  # 4 degrees of freedom, p = 0.001


def test_draws_follow_the_distribution_that_temperature_and_filters_leave():
    logits = [0.0, 1.0, 2.0, 3.0, -1.0, 2.5]
    drawn = draw_many(logits, 4000, seed=3, temperature=1.7, top_k=4, top_p=0.95)
    left = kept(logits, 1.7, 4, 0.95)
    mass = {token: math.exp(logits[token] / 1.7) for token in left}
    assert set(drawn) == left
    expected = {token: 4000 * mass[token] / sum(mass.values()) for token in left}
    chi_square = sum((drawn.count(t) - e) ** 2 / e for t, e in expected.items())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


# --- the noise: (seed, prompt, choice, position) and nothing else -------------------------------------


def mixed_requests():
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.9, "temperature": 1.5},
        {"min_p": 0.05, "temperature": 2.0, "repetition_penalty": 1.2},
        {"logit_bias": {9: 4.0}, "min_tokens": 3, "presence_penalty": 1.0},
        {"top_k": 1},
        {"top_k": 700, "top_p": 0.999, "temperature": 3.0},
    ]
    return [
        request_with(prompt=[i, i + 1], seed=i % 3, output=range(i % 4), **kind) for i, kind in enumerate(kinds * 3)
    ]


def test_batch_company_and_order_change_nothing():
    requests = mixed_requests()
    logits = torch.randn(len(requests), 1003, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(1003, EOS, CPU)
    alone = [sampler(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
    assert Sampler(1003, EOS, CPU)(logits, requests) == alone
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sampler(logits[order], [requests[row] for row in order])
    assert shuffled == [alone[row] for row in order]
    assert len(set(alone)) > 12


def test_more_rows_than_one_slice(monkeypatch):
    requests = mixed_requests()
    logits = torch.randn(len(requests), 50, generator=torch.Generator().manual_seed(0))
    whole = Sampler(50, EOS, CPU)(logits, requests)
    monkeypatch.setattr(sampler_module, "_ROWS_AT_ONCE", 5)
    assert Sampler(50, EOS, CPU)(logits, requests) == whole


def test_a_request_rebuilt_from_its_tokens_goes_on_the_same():
    def generate(sampler, request, count):
        generator = torch.Generator()
        for _ in range(count):
            generator.manual_seed(request.num_tokens)  # a stand-in for a model: logits follow from the length
            logits = torch.randn(1, 64, generator=generator)
            request.output_token_ids.extend(sampler(logits, [request]))
        return request.output_token_ids

    sampling = {"temperature": 1.2, "seed": 5, "frequency_penalty": 0.5}
    undisturbed = generate(Sampler(64, EOS, CPU), request_with(**sampling), 12)
    first = generate(Sampler(64, EOS, CPU), request_with(**sampling), 5)
    resumed = generate(Sampler(64, EOS, CPU), request_with(output=first, **sampling), 7)
    assert resumed == undisturbed


def test_seed_prompt_and_choice_each_change_the_draws():
    logits = [0.0] * 1000
    runs = [
        draw_many(logits, 8, **fields)
        for fields in (
            {"seed": 1},
            {"seed": 2},
            {"seed": 1, "choice_index": 1},
            {"seed": 1, "prompt": (4, 5, 7)},
            {"seed": -1},
        )
    ]
    assert len({tuple(run) for run in runs}) == len(runs)
    assert draw_many(logits, 8, seed=1) == runs[0]


def test_finished_requests_are_forgotten():
    sampler, request = Sampler(8, EOS, CPU), request_with()
    sampler(torch.zeros(1, 8), [request])
    assert len(sampler._memories) == 1
    del request
    assert len(sampler._memories) == 0


# --- broken logits -----------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([-INF] * 5, 0),
        ([NAN] * 5, 0),
        ([NAN, -INF, 1.0, NAN, -INF], 2),
        ([0.0, 1.0, INF, NAN, 2.0], 2),
        ([0.0, INF, 5.0, -INF, -3.0], 1),
    ],
)
def test_broken_rows_give_a_token_in_range(logits, expected, temperature):
    assert sample_one(logits, temperature=temperature) == expected


def test_a_broken_row_costs_its_neighbours_nothing():
    requests = [request_with(seed=i, prompt=[i]) for i in range(6)]
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    healthy = Sampler(40, EOS, CPU)(logits, requests)
    logits[2], logits[4, 7] = NAN, INF
    broken = Sampler(40, EOS, CPU)(logits, requests)
    assert [broken[row] for row in (0, 1, 3, 5)] == [healthy[row] for row in (0, 1, 3, 5)]
    assert broken[2] == 0
    assert broken[4] == 7


def test_a_broken_request_is_logged_once(caplog):
    sampler, request = Sampler(4, EOS, CPU), request_with()
    for _ in range(3):
        sampler(torch.full((1, 4), NAN), [request])
    assert [record.getMessage() for record in caplog.records] == [
        "request ('r', 0): logits are masked entirely, infinite or NaN (nan)"
    ]


def test_masking_the_whole_vocabulary_gives_token_0():
    assert sample_one([1.0, 2.0], prompt=[0], min_tokens=1, stop_token_ids=(0, 1), ignore_eos=True) == 0


def test_eos_ids_beyond_the_vocabulary_need_no_mask():
    sampler = Sampler(4, frozenset({1, 4, 900}), CPU)
    assert sampler(torch.tensor([[0.0, 9.0, 1.0, 0.5]]), [request_with(temperature=0.0, min_tokens=1)]) == [2]
