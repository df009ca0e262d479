"""The reference kernels over pools of another format, float8 with scales first of all, against float64."""

import math

import pytest
import torch

from kernels.face import KvScales
from kernels.reference import ReferenceKernels
from tests.kernels.float8_case import FLOAT8, Float8Case, all_kinds_of_numbers, numbers_of, scales_for, to_codes
from tests.kernels.paged_case import PagedCase, relative_error

KERNELS = ReferenceKernels()
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of a result in each dtype: attention itself is computed in float32."""


def case_of(rows, dtype=torch.float32, block_size=4, num_heads=6, num_kv_heads=2, head_dim=16) -> Float8Case:
    sizes = {"block_size": block_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return Float8Case(PagedCase(rows, dtype=dtype, **sizes))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_attention_over_float8_is_that_over_the_numbers_it_stands_for(num_kv_heads, window, dtype):
    decode = case_of([(1, 1), (1, 16), (1, 33)], dtype, num_kv_heads=num_kv_heads)
    prefill = case_of([(3, 3), (5, 17), (1, 16)], dtype, num_kv_heads=num_kv_heads)
    for case, attend in ((decode, KERNELS.paged_decode), (prefill, KERNELS.paged_prefill)):
        output = attend(*case.arguments(window))
        assert output.dtype == dtype
        assert relative_error(output, case.expected(window)) < ROUNDING[dtype]


@pytest.mark.parametrize("forgotten", ["key", "value"])
def test_a_forgotten_scale_would_show(forgotten):
    """The negative control of the test above: with one scale of 1.0 the same comparison fails by far."""
    case = case_of([(1, 16), (1, 33)])
    *arguments, scales = case.arguments(None)
    parts = {"key": scales.key, "value": scales.value, forgotten: torch.ones_like(scales.key)}
    output = KERNELS.paged_decode(*arguments, KvScales(**parts))
    assert relative_error(output, case.expected(None)) > 0.1


@pytest.mark.parametrize("sources", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rope_store_rounds_to_the_nearest_code_and_saturates(sources):
    numbers = all_kinds_of_numbers().to(sources)
    value = numbers.reshape(-1, 1, 1).expand(-1, 2, 2)  # as key and value of two heads with scales of their own
    num_tokens, scales = len(value), scales_for(2)
    angles = torch.zeros(num_tokens, 1)  # no rotation: a key stays what it is, but for the sign of 0
    k_pool, v_pool = torch.zeros(2, num_tokens // 16 + 1, 16, 2, 2).to(FLOAT8)
    slots = torch.arange(num_tokens)
    query = torch.zeros(num_tokens, 2, 2, dtype=sources)
    KERNELS.rope_store(query, value, value, angles.cos(), angles.sin(), k_pool, v_pool, slots, scales)
    for pool, scale in ((k_pool, scales.key), (v_pool, scales.value)):
        stored = pool.flatten(0, 1)[:num_tokens]
        expected = to_codes(value, scale)
        finite = ~value.isnan() & ~value.isinf()  # a rotation makes NaN of an infinity
        assert torch.equal(stored.double()[finite], expected.double()[finite])
        assert (stored.double()[finite].abs() <= 448.0).all()
        assert stored.double()[value.isnan()].isnan().all()
    assert torch.equal(stored.double()[value.isinf()], expected.double()[value.isinf()])


def test_only_the_slots_of_the_batch_are_written():
    k_pool, v_pool = torch.full((2, 2, 4, 2, 8), math.nan).to(FLOAT8)
    key, value, angles = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.zeros(3, 4)
    scales, slots = scales_for(2), torch.tensor([5, 0, 3])
    KERNELS.rope_store(key, key, value, angles.cos(), angles.sin(), k_pool, v_pool, slots, scales)
    written = ~v_pool.float().isnan().all(-1).all(-1).flatten()
    assert written.nonzero().flatten().tolist() == [0, 3, 5]
    assert torch.equal(v_pool.flatten(0, 1)[slots].double(), to_codes(value, scales.value).double())


def test_gather_and_splice_move_bytes():
    """All 256 codes, NaN among them, arrive as they were."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 2, 16)
    k_pool, v_pool = torch.zeros(2, 3, 4, 3, 16).to(FLOAT8)
    slots = torch.tensor([11, 0, 7, 3, 4, 9, 2, 5])
    KERNELS.splice_kv(k_pool, v_pool, slots, codes.view(FLOAT8), codes.flip(0).view(FLOAT8), head_start=1)
    key, value = KERNELS.gather_kv(k_pool, v_pool, slots)
    assert key.dtype == value.dtype == FLOAT8
    assert torch.equal(key.view(torch.uint8)[:, 1:], codes)
    assert torch.equal(value.view(torch.uint8)[:, 1:], codes.flip(0))
    assert not key.view(torch.uint8)[:, 0].any()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_any_two_formats_go_together(dtype, stored):
    case = PagedCase([(1, 9), (1, 20)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=8, dtype=stored)
    case.query = case.query.to(dtype)
    arguments = (case.query, case.k_pool, case.v_pool, case.rows, case.scale, None)
    for attend in (KERNELS.paged_decode, KERNELS.paged_prefill):
        assert relative_error(attend(*arguments), case.expected(None)) < max(ROUNDING[dtype], 1e-5)


def test_a_number_too_large_for_float16_saturates():
    value = torch.tensor([1e6, -1e6, 3.0, math.nan]).reshape(1, 1, 4)
    k_pool, v_pool = torch.zeros(2, 1, 1, 1, 4, dtype=torch.float16)
    angles = torch.zeros(1, 2)
    KERNELS.rope_store(value, value, value, angles.cos(), angles.sin(), k_pool, v_pool, torch.tensor([0]))
    assert v_pool.flatten().tolist()[:3] == [65504.0, -65504.0, 3.0]
    assert v_pool.flatten()[3].isnan()


def test_scales_come_with_float8_and_only_with_it():
    case = case_of([(1, 5)])
    *arguments, scales = case.arguments(None)
    with pytest.raises(AssertionError, match="float8"):
        KERNELS.paged_decode(*arguments, None)
    plain = case.case
    with pytest.raises(AssertionError, match="float32"):
        KERNELS.paged_prefill(plain.query, plain.k_pool, plain.v_pool, plain.rows, 1.0, None, None, scales)
    with pytest.raises(AssertionError):
        KERNELS.paged_decode(*arguments, KvScales(scales.key[:1], scales.value))


def test_the_search_for_codes_agrees_with_torch():
    """`to_codes` is what the tests above trust: torch's own rounding is another implementation of the same."""
    numbers = all_kinds_of_numbers().reshape(-1, 1, 1)
    one = torch.ones(1)
    expected = numbers.clamp(-448.0, 448.0).to(FLOAT8)
    assert torch.equal(to_codes(numbers, one).double().nan_to_num(), expected.double().nan_to_num())
    assert torch.equal(numbers_of(expected, one).isnan(), numbers.isnan())
