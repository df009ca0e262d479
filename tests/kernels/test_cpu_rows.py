"""Native operators on single tokens against float64 and the reference; the kernels write nothing they should not.

Bounds on the relative error: float32 1e-6, bfloat16 8e-3 (two roundings of up to 2**-8 each, as in the reference).
"""

import math

import pytest
import torch

from kernels.reference import ReferenceKernels
from tests.kernels.cpu_builds import BUILDS, cpu_kernels
from tests.kernels.paged_case import relative_error

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
EVERY_BUILD = pytest.mark.parametrize("build", BUILDS)
SIZES = pytest.mark.parametrize("size", [1, 15, 16, 33, 64, 576, 4096])
TOKENS = (1, 3, 100)
REFERENCE = ReferenceKernels()

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@EVERY_BUILD
@DTYPES
@SIZES
def test_rms_norm_and_its_sum(size, dtype, build):
    for tokens in TOKENS:
        x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((tokens, size), (tokens, size), (size,)))
        normed, total = cpu_kernels(build).add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        wide = total.double()
        expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert relative_error(normed, expected) < BOUNDS[dtype]
        assert torch.equal(cpu_kernels(build).rms_norm(total, weight, 1e-5), normed)


@EVERY_BUILD
@DTYPES
def test_rms_norm_of_heads_that_are_a_slice(dtype, build):
    fused, weight = torch.randn(5, 7, 24).to(dtype), torch.randn(24).to(dtype)
    for heads in (fused[:, 2:5], fused[:, :, :], fused[:, 1:2]):
        normed = cpu_kernels(build).rms_norm(heads, weight, 1e-6)
        assert normed.shape == heads.shape
        torch.testing.assert_close(normed, REFERENCE.rms_norm(heads, weight, 1e-6), rtol=1e-2, atol=1e-6)


@EVERY_BUILD
@DTYPES
@SIZES
def test_silu_mul(size, dtype, build):
    for tokens in TOKENS:
        gate_up = (3 * torch.randn(tokens, 2 * size)).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        expected = gate / (1 + torch.exp(-gate)) * up
        error = (
            ((cpu_kernels(build).silu_mul(gate_up).double() - expected).abs() / expected.abs().clamp(min=1e-30))
            .max()
            .item()
        )
        assert error < BOUNDS[dtype]


@EVERY_BUILD
def test_silu_mul_of_extremes(build):
    gate = torch.tensor([[1e30, -1e30, 200.0, -200.0, 0.0, math.nan, -87.0, 88.0]])
    result = cpu_kernels(build).silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))[0]
    assert result[:5].tolist() == [pytest.approx(1e30), pytest.approx(0, abs=1e-7), 200.0, pytest.approx(0), 0.0]
    assert result[5].isnan()
    assert result[6:].tolist() == [pytest.approx(0, abs=1e-30), 88.0]


@EVERY_BUILD
@DTYPES
@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 96, 128, 256])
def test_rope_store(head_dim, dtype, build):
    """Query, key and value are slices of one product, as in the model."""
    tokens, heads, kv_heads, block_size = 6, 4, 2, 4
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    query, key, value = fused.split((heads, kv_heads, kv_heads), dim=1)
    angles = torch.randn(tokens, head_dim // 2) * 10
    slots = torch.randperm(5 * block_size)[:tokens]
    shape = (5, block_size, kv_heads, head_dim)
    pools = [torch.full(shape, math.nan, dtype=dtype) for _ in range(4)]
    arguments = (query, key, value, angles.cos(), angles.sin())
    rotated = cpu_kernels(build).rope_store(*arguments, *pools[:2], slots)
    expected = REFERENCE.rope_store(*arguments, *pools[2:], slots)
    bound = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(rotated, expected, **bound)
    torch.testing.assert_close(pools[0], pools[2], equal_nan=True, **bound)
    torch.testing.assert_close(pools[1], pools[3], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_gather_and_splice_equal_the_reference(dtype):
    k_pool, v_pool = torch.randn(4, 4, 3, 10).to(dtype), torch.randn(4, 4, 3, 10).to(dtype)
    slots = torch.tensor([15, 2, 3, 8])
    kernels = cpu_kernels("native")
    for ours, theirs in zip(
        kernels.gather_kv(k_pool, v_pool, slots), REFERENCE.gather_kv(k_pool, v_pool, slots), strict=True
    ):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)
    for heads in (slice(0, 1), slice(1, 3), slice(0, 3)):
        key, value = torch.randn(4, 3, 10).to(dtype)[:, heads], torch.randn(4, 3, 10).to(dtype)[:, heads]
        expected = k_pool.clone(), v_pool.clone()
        REFERENCE.splice_kv(*expected, slots, key, value, heads.start)
        kernels.splice_kv(k_pool, v_pool, slots, key, value, heads.start)
        assert torch.equal(k_pool, expected[0])
        assert torch.equal(v_pool, expected[1])


def test_float16_goes_to_the_reference():
    kernels = cpu_kernels("native")
    x, weight = torch.randn(3, 20).half(), torch.randn(20).half()
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert torch.equal(kernels.add_rms_norm(x, x, weight, 1e-5)[0], REFERENCE.add_rms_norm(x, x, weight, 1e-5)[0])
    assert torch.equal(kernels.silu_mul(x), REFERENCE.silu_mul(x))


def test_a_wrong_format_is_noticed_before_it_is_read_as_numbers():
    kernels = cpu_kernels("native")
    with pytest.raises(AssertionError, match=r"float32 where torch\.bfloat16 is due"):
        kernels.rms_norm(torch.randn(2, 8).bfloat16(), torch.randn(8), 1e-5)
    with pytest.raises(AssertionError):
        kernels.gather_kv(torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), torch.tensor([0], dtype=torch.int32))
