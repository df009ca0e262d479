"""The checks of tests/kernels/triton_checks.py on a device: the interpreter's grid, bfloat16, longer rows, and the
configs that are shipped; then the whole forward."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from kernels.select import select_kernels  # noqa: E402
from kernels.triton_backend.configs import attention_configs  # noqa: E402
from kernels.triton_backend.device import architecture_of  # noqa: E402
from tests.kernels import triton_checks as checks  # noqa: E402
from tests.kernels.triton_pipeline import check_greedy_tokens  # noqa: E402
from tests.tiny_models import TINY_MODELS  # noqa: E402

CUDA = torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)
LONG_DECODES = [
    checks.Shape(
        checks._decode(1, size - 1, size, size + 1, 4096, 20_000), size, dim, 32, heads, dtype=dtype, window=window
    )
    for dim in checks.HEAD_DIMS
    for size in (16, 32, 64, 128)
    for heads, dtype in ((8, torch.bfloat16), (32, torch.float16))
    for window in (None, 1000)
]
LONG_PREFILLS = [
    checks.Shape(((512, 512), (1, 1), (300, 4096), (33, 1000)), size, dim, 32, heads, dtype=dtype, window=window)
    for dim in checks.HEAD_DIMS
    for size, heads, dtype in ((16, 8, torch.bfloat16), (64, 32, torch.float16))
    for window in (None, 1000)
]


def shipped(shape):
    return attention_configs(architecture_of(CUDA), shape.head_dim, shape.dtype, shape.stored)


@pytest.mark.parametrize("shape", checks.DECODES, ids=str)
def test_decode_on_the_interpreters_grid(shape):
    for dtype in (shape.dtype, torch.bfloat16):
        checks.check_decode(replace(shape, dtype=dtype), CUDA)


@pytest.mark.parametrize("shape", [*checks.PREFILLS, *checks.CHUNK_OFFSETS], ids=str)
def test_prefill_on_the_interpreters_grid(shape):
    for dtype in (shape.dtype, torch.bfloat16):
        checks.check_prefill(replace(shape, dtype=dtype), CUDA)


@pytest.mark.parametrize("shape", checks.STORED_DECODES, ids=str)
def test_decode_over_other_formats(shape):
    for architecture in dict.fromkeys(("sm_80", architecture_of(CUDA))):
        checks.check_decode(shape, CUDA, architecture=architecture)


@pytest.mark.parametrize("shape", checks.STORED_PREFILLS, ids=str)
def test_prefill_over_other_formats(shape):
    for architecture in dict.fromkeys(("sm_80", architecture_of(CUDA))):
        checks.check_prefill(shape, CUDA, architecture=architecture)


def test_float8_codes():
    checks.check_codes_are_those_of_torch(CUDA)
    for dtype in (*HALVES, torch.float32):
        checks.check_every_code_is_read(dtype, CUDA)


@pytest.mark.parametrize("shape", LONG_DECODES, ids=str)
def test_decode_with_the_shipped_configs(shape):
    for stored in (None, checks.FLOAT8):
        shape = replace(shape, stored=stored)
        checks.check_decode(shape, CUDA, shipped(shape), architecture_of(CUDA))


@pytest.mark.parametrize("shape", LONG_PREFILLS, ids=str)
def test_prefill_with_the_shipped_configs(shape):
    for stored in (None, checks.FLOAT8):
        shape = replace(shape, stored=stored)
        checks.check_prefill(shape, CUDA, shipped(shape), architecture_of(CUDA))


def test_bits_depend_on_neither_batch_nor_grid():
    checks.check_rows_have_the_same_bits_in_any_batch(CUDA)
    checks.check_any_number_of_programs_gives_the_same_bits(CUDA)


def test_offsets_past_32_bits():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    checks.check_offsets_past_32_bits(lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=CUDA), CUDA)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_memory_kernels(dtype):
    for *shape, _ in checks.ROPES:
        checks.check_rope_store(*shape, dtype, CUDA)
        checks.check_rope_store(*shape, dtype, CUDA, checks.FLOAT8)
    for *shape, _ in checks.MOVES:
        checks.check_moves(*shape, dtype, CUDA)
    for *shape, _ in checks.ELEMENTWISE:
        checks.check_elementwise(*shape, dtype, CUDA)


def test_auto_is_triton():
    assert select_kernels("auto", CUDA).name == "triton"


@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens(name, tmp_path):
    for kv_cache_dtype in ("auto", "fp8"):
        check_greedy_tokens(name, tmp_path / kv_cache_dtype, "cuda", num_new=10, kv_cache_dtype=kv_cache_dtype)
