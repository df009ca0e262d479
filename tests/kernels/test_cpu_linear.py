"""Prepared linears against float64.

Bounds on the relative error: bfloat16 5e-3 (one rounding), float32 2e-6, and 1e-5 for sums of bfloat16 products that
are never rounded.
"""

import weakref

import pytest
import torch

from kernels.cpu.linear import FEW_ROWS, FusedMlp, PackedLinear
from kernels.reference import ReferenceKernels
from tests.kernels.cpu_builds import BUILDS, cpu_kernels
from tests.kernels.paged_case import relative_error

EVERY_BUILD = pytest.mark.parametrize("build", BUILDS)
ROWS = (1, 2, 3, 11, 12, 13, 24, 25, 95, 96, 97, 200)
BOUNDS = {(torch.bfloat16, False): 5e-3, (torch.bfloat16, True): 5e-3, (torch.float32, False): 2e-6}

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@EVERY_BUILD
@pytest.mark.parametrize(("dtype", "wide"), BOUNDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (32, 64), (33, 64), (70, 34), (320, 577), (96, 576)])
def test_products(out_features, in_features, bias, dtype, wide, build):
    weight = torch.randn(out_features, in_features).to(dtype)
    shift = torch.randn(out_features).to(dtype) if bias else None
    product = cpu_kernels(build).prepare_linear(weight, shift, wide=wide)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        expected = x.double() @ weight.double().T + (0 if shift is None else shift.double())
        output = product(x)
        assert output.dtype == (torch.float32 if wide else dtype)
        # Of two terms that cancel each other the sum is small, and its error is that of the terms.
        terms = (x.double().abs() @ weight.double().abs().T).norm() / in_features**0.5
        error = ((output.double() - expected).norm() / torch.maximum(expected.norm(), terms)).item()
        packed_and_wide = wide and isinstance(product, PackedLinear)
        assert error < (1e-5 if packed_and_wide else BOUNDS[dtype, wide]), (rows, error)


@pytest.mark.parametrize("kernels", [ReferenceKernels(), cpu_kernels("native")], ids=lambda kernels: kernels.name)
def test_wide_results_are_float32(kernels):
    weight, x = torch.randn(40, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    output = kernels.prepare_linear(weight, None, wide=True)(x)
    assert output.dtype == torch.float32
    assert relative_error(output, x.double() @ weight.double().T) < 1e-2


def test_rows_with_gaps_between_them():
    weight, x = torch.randn(64, 32).bfloat16(), torch.randn(20, 100).bfloat16()
    product = cpu_kernels("native").prepare_linear(weight, None)
    assert torch.equal(product(x[:, 30:62]), product(x[:, 30:62].contiguous()))


def test_a_row_gives_the_same_bits_in_any_batch_and_on_any_number_of_threads():
    weight, x = torch.randn(200, 128).bfloat16(), torch.randn(200, 128).bfloat16()
    product = cpu_kernels("native").prepare_linear(weight, None, wide=True)
    if not isinstance(product, PackedLinear):
        pytest.skip("this CPU has no bfloat16 products")
    before, together = torch.get_num_threads(), product(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(7, 20), slice(0, 100), slice(150, 200)):
                assert torch.equal(product(x[rows]), together[rows])
    finally:
        torch.set_num_threads(before)


def test_a_packed_linear_lets_go_of_the_weight():
    weight = torch.randn(64, 32).bfloat16()
    product = cpu_kernels("native").prepare_linear(weight, None)
    if not isinstance(product, PackedLinear):
        pytest.skip("this CPU has no bfloat16 products")
    expected, gone = product(torch.ones(1, 32).bfloat16()), weakref.ref(weight)
    weight.zero_()
    assert torch.equal(product(torch.ones(1, 32).bfloat16()), expected)
    del weight
    assert gone() is None


def test_an_input_of_another_width_is_refused():
    product = cpu_kernels("native").prepare_linear(torch.randn(64, 32).bfloat16(), None)
    with pytest.raises((AssertionError, RuntimeError)):
        product(torch.randn(2, 30).bfloat16())


def make_block(kernels, kind, bias):
    """A block over hidden 70, inner 48, seeded: the same for all kernels."""
    generator = torch.Generator().manual_seed(5)

    def linear(out_features, in_features):
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        shift = torch.randn(out_features, generator=generator).bfloat16() if bias else None
        return kernels.prepare_linear(weight.bfloat16(), shift)

    norm = torch.randn(70, generator=generator).bfloat16()
    if kind == "norm_linear":
        return kernels.norm_linear(norm, 1e-5, linear(100, 70))
    return kernels.norm_mlp(norm, 1e-5, linear(96, 70), linear(70, 48))


@EVERY_BUILD
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["norm_linear", "norm_mlp"])
def test_blocks_are_what_their_parts_make(kind, bias, build):
    kernels = cpu_kernels(build)
    ours, theirs = make_block(kernels, kind, bias), make_block(ReferenceKernels(), kind, bias)
    for rows in (1, 5, FEW_ROWS, FEW_ROWS + 1, 100):
        x, residual = torch.randn(rows, 70).bfloat16(), torch.randn(rows, 70).bfloat16()
        (output, total), (expected, expected_total) = ours(x, residual), theirs(x, residual)
        assert torch.equal(total, expected_total)
        assert relative_error(output, expected.double()) < 2e-2, "a few roundings of 2**-8"
        if rows > FEW_ROWS:
            continue
        more = torch.zeros(FEW_ROWS + 1 - rows, 70).bfloat16()
        many, _ = ours(torch.cat((x, more)), torch.cat((residual, more)))
        assert torch.equal(many[:rows], output), "fused and composed give the same bits"


def test_a_native_block_of_few_rows_is_one_call(monkeypatch):
    kernels = cpu_kernels("native")
    block = make_block(kernels, "norm_mlp", bias=False)
    if not isinstance(block, FusedMlp):
        pytest.skip("this CPU has no bfloat16 products")
    monkeypatch.setattr(kernels, "silu_mul", None)
    x = torch.randn(FEW_ROWS, 70).bfloat16()
    assert block(x, x)[0].shape == x.shape
