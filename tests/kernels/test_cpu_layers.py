"""A decoder layer as one native call against the same layer out of single kernels: the bits are equal."""

import dataclasses

import pytest
import torch

from kernels.cpu.linear import FEW_ROWS
from kernels.face import DecodeStep, LayerParts
from kernels.reference import ReferenceKernels
from tests.kernels.cpu_builds import BUILDS, cpu_kernels
from tests.kernels.paged_case import PagedCase

HIDDEN, INNER = 96, 80

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def make_parts(kernels, case, generator, *, bias=False, qk_norm=False, window=None):
    heads, kv_heads, head_dim = case.query.shape[1], case.k_pool.shape[2], case.query.shape[2]

    def linear(out_features, in_features):
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        shift = torch.randn(out_features, generator=generator).bfloat16() if bias else None
        return kernels.prepare_linear(weight.bfloat16(), shift)

    def norm(size):
        return (1 + torch.randn(size, generator=generator) / 4).bfloat16()

    return LayerParts(
        attention_norm=norm(HIDDEN),
        qkv=linear((heads + 2 * kv_heads) * head_dim, HIDDEN),
        query_norm=norm(head_dim) if qk_norm else None,
        key_norm=norm(head_dim) if qk_norm else None,
        out=linear(HIDDEN, heads * head_dim),
        mlp_norm=norm(HIDDEN),
        gate_up=linear(2 * INNER, HIDDEN),
        down=linear(HIDDEN, INNER),
        eps=1e-5,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=case.scale,
        window=window,
    )


def make_case(rows, heads=6, kv_heads=2, head_dim=32):
    return PagedCase(
        [(1, 5 + 61 * index % 700) for index in range(rows)],
        block_size=16,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )


def make_step(case):
    angles = torch.randn(len(case.query), case.query.shape[2] // 2)
    last = torch.tensor(case.rows.host_context_lens) - 1
    blocks = case.rows.block_tables[torch.arange(len(last)), last // 16].long()
    return DecodeStep(angles.cos(), angles.sin(), blocks * 16 + last % 16, case.rows, torch.bfloat16)


def out_of_single_kernels(kernels, parts, hidden, residual, step, k_pool, v_pool):
    fused, total = kernels.norm_linear(parts.attention_norm, parts.eps, parts.qkv)(hidden, residual)
    heads = fused.view(len(fused), -1, parts.head_dim)
    query, key, value = torch.split(heads, [parts.num_heads, parts.num_kv_heads, parts.num_kv_heads], dim=1)
    if parts.query_norm is not None:
        query = kernels.rms_norm(query, parts.query_norm, parts.eps)
        key = kernels.rms_norm(key, parts.key_norm, parts.eps)
    query = kernels.rope_store(query, key, value, step.cos, step.sin, k_pool, v_pool, step.slot_mapping)
    attended = kernels.paged_decode(query, k_pool, v_pool, step.rows, parts.scale, parts.window)
    block = kernels.norm_mlp(parts.mlp_norm, parts.eps, parts.gate_up, parts.down)
    return block(parts.out(attended.flatten(1)), total)


@pytest.mark.parametrize("rows", [1, 3, 16, FEW_ROWS])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"qk_norm": True}, {"window": 40}, {"bias": True, "qk_norm": True, "window": 300}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 2, 32), (5, 5, 24), (8, 1, 16), (20, 2, 64)], ids=str)
def test_two_layers_equal_their_single_kernels(shape, options, rows):
    kernels, generator = cpu_kernels("native"), torch.Generator().manual_seed(rows)
    case = make_case(rows, *shape)
    parts = [make_parts(kernels, case, generator, **options) for _ in range(2)]
    layers = kernels.prepare_layers(parts)
    if layers is None:
        pytest.skip("this CPU has no bfloat16 products")
    step = make_step(case)
    hidden, residual = (torch.randn(rows, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    theirs = hidden, residual
    ours = hidden.clone(), residual.clone()
    run = layers.begin(*ours, step)
    for index, part in enumerate(parts):
        pools = [(case.k_pool.clone(), case.v_pool.clone()) for _ in range(2)]
        theirs = out_of_single_kernels(kernels, part, *theirs, step, *pools[0])
        run(index, *pools[1])
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(pools[0][0].view(torch.int16), pools[1][0].view(torch.int16))
        assert torch.equal(pools[0][1].view(torch.int16), pools[1][1].view(torch.int16))
        assert not ours[0].isnan().any()


def test_bits_do_not_depend_on_threads():
    kernels, case = cpu_kernels("native"), make_case(16)
    layers = kernels.prepare_layers([make_parts(kernels, case, torch.Generator().manual_seed(0))])
    if layers is None:
        pytest.skip("this CPU has no bfloat16 products")
    step, results, before = make_step(case), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            hidden, residual = torch.ones(16, HIDDEN).bfloat16(), torch.ones(16, HIDDEN).bfloat16()
            layers.begin(hidden, residual, step)(0, case.k_pool.clone(), case.v_pool.clone())
            results.append(hidden)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_steps_for_the_single_kernels():
    kernels, case = cpu_kernels("native"), make_case(FEW_ROWS + 1)
    layers = kernels.prepare_layers([make_parts(kernels, case, torch.Generator().manual_seed(0))])
    if layers is None:
        pytest.skip("this CPU has no bfloat16 products")
    many = torch.ones(FEW_ROWS + 1, HIDDEN).bfloat16()
    assert layers.begin(many, many.clone(), make_step(case)) is None
    few, one = many[:1], make_case(1)
    assert layers.begin(few, few.clone(), make_step(one)) is not None
    other_pool = dataclasses.replace(make_step(one), pool_dtype=torch.float32)
    assert layers.begin(few, few.clone(), other_pool) is None


@pytest.mark.parametrize("build", BUILDS)
def test_backends_without_such_a_call_say_so(build):
    case = make_case(1)
    for kernels in (ReferenceKernels(), cpu_kernels(build)):
        parts = [make_parts(kernels, case, torch.Generator().manual_seed(0))]
        packs = hasattr(parts[0].qkv, "weights")
        assert (kernels.prepare_layers(parts) is not None) == packs
