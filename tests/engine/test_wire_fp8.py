"""KV in eight bits: the bytes are what the wire says, and the error is what the documents say."""

import pytest
import torch

from engine.buffers import as_bytes
from engine.wire_fp8 import LARGEST, dequantise, quantise
from kvtransfer.layout import FP8, head_bytes
from kvtransfer.worker_facts import KvLayout

SHAPES = [(1, 1, 8), (5, 3, 64), (16, 2, 80), (7, 4, 128)]


def numbers(shape, dtype=torch.bfloat16, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def twin(tensor) -> torch.Tensor:
    """The slow way: head by head, number by number."""
    result = torch.empty(tensor.shape)
    for token in range(tensor.shape[0]):
        for head in range(tensor.shape[1]):
            row = [float(x) for x in tensor[token, head]]
            scale = torch.tensor(max(abs(x) for x in row)) / LARGEST or torch.tensor(1.0)
            for index, x in enumerate(row):
                result[token, head, index] = (torch.tensor(x) / scale).to(torch.float8_e4m3fn).float() * scale
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip_is_what_its_slow_twin_makes_of_it(shape, dtype):
    tensor = numbers(shape, dtype)
    found = dequantise(quantise(tensor), shape, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, twin(tensor).to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_as_many_as_the_wire_expects(shape):
    tokens, heads, head_dim = shape
    layout = KvLayout(1, heads, head_dim, "bfloat16", 16)
    assert len(quantise(numbers(shape))) == tokens * heads * head_bytes(layout, FP8)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_the_error_is_within_the_bound_that_is_stated(size):
    tensor = numbers((64, 3, 64), torch.float32) * size
    found = dequantise(quantise(tensor), (64, 3, 64), torch.float32)
    scale = tensor.abs().amax(dim=-1, keepdim=True) / LARGEST
    bound = torch.maximum(tensor.abs() / 16, scale / 1024) * (1 + 1e-5)
    assert bool(((found - tensor).abs() <= bound).all())


def test_the_relative_error_of_normal_numbers_is_what_the_documents_say():
    tensor = numbers((512, 3, 64), torch.float32)
    found = dequantise(quantise(tensor), (512, 3, 64), torch.float32)
    relative = float((found - tensor).norm() / tensor.norm())
    assert 0.02 < relative < 0.03


def test_a_large_head_costs_its_neighbours_nothing():
    tensor = numbers((4, 3, 64), torch.float32)
    alone = dequantise(quantise(tensor), (4, 3, 64), torch.float32)
    tensor[1, 1] *= 1e6
    beside = dequantise(quantise(tensor), (4, 3, 64), torch.float32)
    tensor[1, 1], alone[1, 1], beside[1, 1] = 0, 0, 0
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40])
def test_zeros_and_numbers_next_to_it_stay_small_and_finite(value):
    found = dequantise(quantise(torch.full((2, 2, 8), value)), (2, 2, 8), torch.float32)
    assert bool((found.abs() <= abs(value)).all())


def test_the_largest_number_keeps_its_place():
    tensor = torch.zeros(1, 1, 8)
    tensor[0, 0, 3] = 3.0e38
    found = dequantise(quantise(tensor), (1, 1, 8), torch.float32)
    assert torch.isfinite(found).all()
    assert abs(float(found[0, 0, 3]) - 3.0e38) < 1e32


def test_the_buffer_may_start_anywhere():
    tensor = numbers((3, 2, 8))
    packed = quantise(tensor)
    shifted = memoryview(bytearray(len(packed) + 1))[1:]
    shifted[:] = packed
    assert torch.equal(dequantise(shifted, (3, 2, 8), torch.bfloat16), dequantise(packed, (3, 2, 8), torch.bfloat16))
    assert len(packed) < len(as_bytes(tensor))
