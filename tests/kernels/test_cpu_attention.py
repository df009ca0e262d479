"""Native attention against the definition in float64, over a sampled grid and on every build of the kernels.

Bounds on the relative error (see `relative_error`): float32 2e-6; bfloat16 1e-2, of which 4e-3 is the rounding of the
result and the rest that of the weights.
"""

import random

import pytest
import torch

from kernels.face import RaggedRows
from tests.kernels.cpu_builds import BUILDS, cpu_kernels
from tests.kernels.paged_case import PagedCase, ragged_rows, relative_error

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
BLOCK_SIZES = (1, 5, 16, 32, 128)
RATIOS = (1, 3, 4, 7, 8)
HEAD_DIMS = (8, 64, 80, 96, 128, 256)
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
EVERY_BUILD = pytest.mark.parametrize("build", BUILDS)

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def check(build, case, window, record_property):
    output = cpu_kernels(build).paged_prefill(case.query, case.k_pool, case.v_pool, case.rows, case.scale, window)
    assert output.dtype == case.query.dtype
    error = relative_error(output, case.expected(window))
    record_property("relative_error", error)
    assert error < BOUNDS[case.query.dtype], error


def enumerate_samples():
    """Two samples on this CPU's own build, one on each other."""
    return [("native", 0), *((build, number) for number, build in enumerate(BUILDS, start=1))]


def lengths_around(block_size):
    return [max(1, block_size - 1), block_size, block_size + 1, 1]


def windows_around(block_size, context):
    return [None, 1, block_size, block_size + 1, max(1, context - 1), context, context + 1]


@DTYPES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("build", "sample"), enumerate_samples())
def test_sampled_mixtures(sample, head_dim, dtype, build, record_property):
    """Prompts without, with a partial and with a full prefix, beside single tokens."""
    rng = random.Random(f"{sample} {head_dim} {dtype}")
    block_size, ratio, kv_heads = rng.choice(BLOCK_SIZES), rng.choice(RATIOS), rng.choice((1, 2, 3))
    lengths = [*lengths_around(block_size), rng.randrange(100, 400)]
    rows = [(length, length) for length in lengths]
    rows += [(rng.randrange(1, length + 1), length + 130) for length in lengths]
    rows += [(1, length) for length in (*lengths, 600)]
    rng.shuffle(rows)
    case = PagedCase(
        rows,
        block_size=block_size,
        num_heads=ratio * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        seed=sample,
    )
    check(build, case, rng.choice(windows_around(block_size, 400)), record_property)


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097])
def test_long_contexts_and_windows_at_the_edges_of_tiles_and_segments(window, dtype, record_property):
    rows = [(1, 4096), (3, 4096), (1, 512), (1, 513), (1, 1025), (40, 128), (2, 129)]
    case = PagedCase(rows, block_size=16, num_heads=3, num_kv_heads=1, head_dim=64, dtype=dtype)
    check("native", case, window, record_property)


@DTYPES
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_batches_of_single_tokens(batch, dtype, record_property):
    rows = [(1, 1 + 37 * index % 300) for index in range(batch)]
    case = PagedCase(rows, block_size=16, num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype)
    output = cpu_kernels("native").paged_decode(case.query, case.k_pool, case.v_pool, case.rows, case.scale, None)
    error = relative_error(output, case.expected(None))
    record_property("relative_error", error)
    assert error < BOUNDS[dtype]


@pytest.mark.parametrize("start", range(0, 40, 3))
def test_a_chunk_at_every_offset(start, record_property):
    case = PagedCase([(40 - start, 40)], block_size=4, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    check("native", case, 7, record_property)


@EVERY_BUILD
@DTYPES
def test_a_row_gives_the_same_bits_in_any_batch_and_on_any_number_of_threads(dtype, build):
    rows = [(1, 700), (64, 90), (1, 7), (1, 1500), (200, 300), (1, 64)]
    case = PagedCase(rows, block_size=16, num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype)
    kernels = cpu_kernels(build)

    def attend(query: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        return kernels.paged_prefill(query, case.k_pool, case.v_pool, rows, case.scale, 650)

    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attend(case.query, case.rows))
        alone = torch.cat([attend(*case.row(index)) for index in range(len(rows))])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], alone)


def test_scores_of_any_size():
    """Scores of thousands must neither overflow nor drown those of other rows."""
    case = PagedCase([(1, 50), (9, 60)], block_size=16, num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float32)
    case.query *= 1e3
    output = cpu_kernels("native").paged_prefill(case.query, case.k_pool, case.v_pool, case.rows, case.scale, None)
    assert relative_error(output, case.expected(None)) < 1e-2
    case.query.zero_()
    output = cpu_kernels("native").paged_prefill(case.query, case.k_pool, case.v_pool, case.rows, case.scale, None)
    assert relative_error(output, case.expected(None)) < BOUNDS[torch.float32]


def test_a_pool_of_more_than_2_to_the_31_numbers():
    """The pool is never written as a whole, so its pages take no memory."""
    block_size, kv_heads, head_dim = 16, 2, 64
    num_blocks = (1 << 31) // (block_size * kv_heads * head_dim) + 4
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_pool, v_pool = (torch.empty_strided(shape, _strides(shape), dtype=torch.bfloat16) for _ in range(2))
    last = num_blocks - 1
    for pool in (k_pool, v_pool):
        pool[last].normal_()
    query = torch.randn(1, 4, head_dim).bfloat16()
    rows = ragged_rows([(1, block_size)], torch.tensor([[last]], dtype=torch.int32))
    small = ragged_rows([(1, block_size)], torch.tensor([[0]], dtype=torch.int32))
    kernels = cpu_kernels("native")
    output = kernels.paged_decode(query, k_pool, v_pool, rows, 0.125, None)
    one_k, one_v = k_pool[last:].contiguous(), v_pool[last:].contiguous()
    assert torch.equal(output, kernels.paged_decode(query, one_k, one_v, small, 0.125, None))
    slots = torch.tensor([last * block_size + 3])
    key, value = kernels.gather_kv(k_pool, v_pool, slots)
    assert torch.equal(key[0], k_pool[last, 3])
    kernels.splice_kv(k_pool, v_pool, slots, value, key, 0)
    assert torch.equal(k_pool[last, 3], value[0])


def _strides(shape):
    return torch.empty(shape, device="meta").stride()


def test_float16_goes_to_the_reference():
    case = PagedCase([(1, 20), (5, 30)], block_size=16, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    output = cpu_kernels("native").paged_prefill(case.query, case.k_pool, case.v_pool, case.rows, case.scale, None)
    assert output.dtype == torch.float16
    assert relative_error(output, case.expected(None)) < 1e-2
