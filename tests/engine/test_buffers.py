"""Tensors as bytes and back: nothing copied on a CPU, every dtype of the wire."""

import pytest
import torch

from engine.buffers import as_bytes, from_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_keeps_every_bit(dtype):
    tensor = torch.randn(3, 2, 5)
    tensor[0, 0, 0] = float("nan")
    tensor = tensor.to(dtype)
    buffer = as_bytes(tensor)
    assert (buffer.nbytes, buffer.format, buffer.ndim) == (tensor.numel() * tensor.itemsize, "B", 1)
    back = from_bytes(buffer, dtype, (3, 2, 5))
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_bytes_are_the_tensors_own_memory():
    tensor = torch.zeros(4)
    buffer = as_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(buffer[:4]) == b"\x00\x00\x80\x3f"
    assert from_bytes(buffer, torch.float32, (4,)).data_ptr() == tensor.data_ptr()


def test_a_tensor_that_is_not_contiguous_is_our_own_bug():
    with pytest.raises(AssertionError):
        as_bytes(torch.zeros(2, 3).t())


def test_a_tensor_that_wants_gradients_can_be_sent():
    assert as_bytes(torch.ones(1, requires_grad=True)).nbytes == 4


def test_a_buffer_of_the_wrong_length_is_refused():
    with pytest.raises(RuntimeError):
        from_bytes(memoryview(bytearray(8)), torch.float32, (3,))
