"""The Triton kernels in Triton's interpreter, which needs no GPU. Dots run in float16 and float32: on bfloat16 operands
the interpreter's are wrong.

The interpreter has to be switched on before triton is imported anywhere, so these tests run in a process of their own:
`test_all_checks_pass_in_a_process_of_its_own` starts it, and in there everything else runs.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")


def loops_over_lengths():
    """Whether triton is there, and its interpreter takes a loop bound that a kernel has loaded."""
    try:
        return Version(importlib.metadata.version("triton")) >= Version("3.7")
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not loops_over_lengths(), reason="needs triton 3.7: 3.6's interpreter breaks on current numpy")
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(900)  # a hundred checks at once: 40 s alone, minutes beside others
def test_all_checks_pass_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 skipped" in result.stdout


if INTERPRETED:
    from tests.kernels import triton_checks as checks
    from tests.kernels.triton_pipeline import check_greedy_tokens

    @pytest.mark.parametrize("shape", checks.DECODES, ids=str)
    def test_decode(shape):
        checks.check_decode(shape, CPU)

    @pytest.mark.parametrize("shape", [*checks.PREFILLS, *checks.CHUNK_OFFSETS], ids=str)
    def test_prefill(shape):
        checks.check_prefill(shape, CPU)

    def test_rows_have_the_same_bits_in_any_batch():
        checks.check_rows_have_the_same_bits_in_any_batch(CPU)

    def test_any_number_of_programs_gives_the_same_bits():
        checks.check_any_number_of_programs_gives_the_same_bits(CPU)

    def test_a_wrong_operand_shows():
        checks.check_result_is_the_kernels_own(CPU)

    def test_offsets_past_32_bits():
        checks.check_offsets_past_32_bits(checks.far_pool, CPU)

    @pytest.mark.parametrize("arguments", checks.ROPES, ids=str)
    def test_rope_store(arguments):
        checks.check_rope_store(*arguments, CPU)

    @pytest.mark.parametrize("shape", checks.STORED_DECODES, ids=str)
    def test_decode_over_other_formats(shape):
        checks.check_decode(shape, CPU)

    @pytest.mark.parametrize("shape", checks.STORED_PREFILLS, ids=str)
    def test_prefill_over_other_formats(shape):
        checks.check_prefill(shape, CPU)

    def test_attention_over_float8_as_chips_get_it_that_convert_it():
        checks.check_decode(checks.STORED_DECODES[1], CPU, architecture="sm_90")
        checks.check_prefill(checks.STORED_PREFILLS[1], CPU, architecture="sm_90")

    @pytest.mark.parametrize("arguments", checks.STORED_ROPES, ids=str)
    def test_rope_store_in_other_formats(arguments):
        *shape, stored = arguments
        checks.check_rope_store(*shape, CPU, stored)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_every_code_is_read(dtype):
        checks.check_every_code_is_read(dtype, CPU)

    def test_codes_are_those_of_torch():
        checks.check_codes_are_those_of_torch(CPU)

    @pytest.mark.parametrize("arguments", checks.MOVES, ids=str)
    def test_moves(arguments):
        checks.check_moves(*arguments, CPU)

    @pytest.mark.parametrize("arguments", checks.ELEMENTWISE, ids=str)
    def test_elementwise(arguments):
        checks.check_elementwise(*arguments, CPU)

    @pytest.mark.parametrize("name", ["smollm2", "mistral", "qwen3"])
    def test_greedy_tokens(name, tmp_path):
        check_greedy_tokens(name, tmp_path, "cpu", num_new=2, padded=name == "mistral")

    def test_greedy_tokens_over_float8(tmp_path):
        check_greedy_tokens("smollm2", tmp_path, "cpu", num_new=2, kv_cache_dtype="fp8")
