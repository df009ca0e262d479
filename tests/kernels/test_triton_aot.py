"""What `make kernels-aot` reports: read from real binaries, and a loss of each kind is a fault."""

import dataclasses
import os

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

from kernels.triton_backend import aot, aot_cases  # noqa: E402
from kernels.triton_backend.compile import _specialise, compile_launch  # noqa: E402
from kernels.triton_backend.configs import ARCHITECTURES  # noqa: E402
from kernels.triton_backend.machine_code import MachineCode, read_machine_code  # noqa: E402

GOOD = MachineCode(128, 0, 1024, 0, frozenset({"HMMA", "wide", "unsplit", "async"}))


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def case_of(kernel, architecture, variant=""):
    return next(
        case for case in aot_cases.cases(architecture) if case.kernel == kernel and case.variant.startswith(variant)
    )


def read(launch, architecture):
    return read_machine_code(compile_launch(launch, architecture), architecture)


def test_every_kernel_is_compiled_for_every_architecture():
    kernels = {
        *("paged_decode", "combine", "paged_prefill", "rope_store", "gather_kv", "splice_kv"),
        *("rms_norm", "head_norm", "add_rms_norm", "silu_mul"),
    }
    assert set(ARCHITECTURES) == {"sm_80", "sm_90", "sm_100", "gfx942"} == set(aot.SHARED_LIMIT)
    for architecture in ARCHITECTURES:
        assert {case.kernel for case in aot_cases.cases(architecture)} == kernels
        for kernel in ("paged_decode", "paged_prefill"):
            assert aot.EXPECTED[kernel, architecture]


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_facts_are_read_from_a_binary(architecture):
    code = read(case_of("paged_decode", architecture, "bf16 9/3 x 64").launch, architecture)
    assert aot.EXPECTED["paged_decode", architecture] <= code.facts
    assert 32 < code.registers < 256
    assert 0 < code.shared < 64 << 10
    assert (code.spilled, code.local_accesses) == (0, 0)


def test_columns_of_tensor_memory_are_read_from_the_compiler():
    """128 x 128 scores and as many sums in float32 take 128 columns each."""
    code = read(case_of("paged_prefill", "sm_100", "bf16 32/8 x 128, block 16").launch, "sm_100")
    assert code.tensor_columns == 256
    assert read(case_of("silu_mul", "sm_100").launch, "sm_100").tensor_columns == 0


@pytest.mark.parametrize(("architecture", "in_hardware"), [("sm_80", False), ("sm_90", True)])
def test_float8_is_read_by_the_chip_where_it_can(architecture, in_hardware):
    launch = case_of("paged_decode", architecture, "bf16 32/8 x 128, block 16, KV fp8").launch
    code = read(launch, architecture)
    assert ("E4M3" in code.facts) == in_hardware == (launch.arguments["k_pool"].dtype == torch.float8_e4m3fn)
    assert aot.expected_facts("paged_decode", "bf16 32/8 x 128, block 16, KV fp8", architecture) <= code.facts
    assert (code.spilled, code.local_accesses) == (0, 0)


def test_every_chip_is_compiled_for_float8():
    for architecture in ARCHITECTURES:
        stored = {case.kernel for case in aot_cases.cases(architecture) if "KV fp8" in case.variant}
        assert {"paged_decode", "paged_prefill", "rope_store"} <= stored


def test_a_spill_is_seen_in_a_binary():
    launch = case_of("paged_prefill", "sm_90", "bf16 16/8 x 256").launch
    code = read(dataclasses.replace(launch, num_warps=4), "sm_90")
    assert code.spilled > 0
    assert code.local_accesses > 0
    assert "spills" in aot.faults_of(code, "sm_90", frozenset())[0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spilled": 8}, "spills 8 bytes"),
        ({"local_accesses": 1}, "spills"),
        ({"shared": (227 << 10) + 1}, "shared memory over"),
        ({"tensor_columns": 512}, None),
        ({"tensor_columns": 544}, "544 columns of tensor memory, the chip has 512"),
        ({"facts": GOOD.facts | {"UTCHMMA"}}, "columns of tensor memory are not known"),
        ({"facts": GOOD.facts | {"UTCHMMA"}, "tensor_columns": 256}, None),
        ({"facts": GOOD.facts - {"HMMA"}}, "no longer HMMA"),
        ({"facts": GOOD.facts - {"wide"}}, "no longer wide"),
    ],
)
def test_each_loss_is_a_fault(change, fault):
    faults = aot.faults_of(dataclasses.replace(GOOD, **change), "sm_90", aot.EXPECTED["paged_decode", "sm_90"])
    assert [fault in text for text in faults] == ([] if fault is None else [True])


def test_launches_are_specialised_as_a_call_is():
    """Factors of 16 are known, ones are constants; what changes from step to step is neither."""
    launch = case_of("paged_decode", "sm_90", "bf16 9/3 x 64").launch
    arguments = {**launch.arguments, "num_rows": 16, "stride_query": 1, "stride_block": 1 << 32, "stride_token": 24}
    signature, constants, attributes = _specialise(dataclasses.replace(launch, arguments=arguments))
    names = launch.kernel.arg_names
    aligned = {names[index] for (index,) in attributes}
    assert (signature["num_rows"], signature["stride_query"], constants["stride_query"]) == ("i32", "constexpr", 1)
    assert (signature["stride_block"], signature["k_pool"], signature["scale"]) == ("i64", "*bf16", "fp32")
    assert {"k_pool", "stride_block"} <= aligned
    assert not {"num_rows", "stride_token", "stride_query", "stride_table"} & aligned


def test_float32_needs_no_matrix_unit_but_half_precision_does():
    assert aot.expected_facts("paged_prefill", "fp32 32/8 x 128", "sm_90") == frozenset()
    assert "HGMMA" in aot.expected_facts("paged_prefill", "bf16 32/8 x 128", "sm_90")
    assert torch.float32 in {shape.dtype for shape in aot_cases._ATTENTIONS}
