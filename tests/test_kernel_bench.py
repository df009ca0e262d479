"""The kernel benchmark: its arithmetic, that all sides do the same work, and what it says where it cannot run."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments import kernel_bench, kernel_cases
from experiments.kernel_bench import check_same, line, main, measure
from experiments.kernel_cases import BLOCK_SIZE, FLOAT8, Bench, PagedWorld
from experiments.kernel_device import BenchDevice
from experiments.kernel_work import (
    LLAMA_8B,
    ModelShape,
    Speeds,
    Work,
    add_rms_norm_work,
    attention_work,
    move_work,
    rope_store_work,
    seen_pairs,
    silu_mul_work,
)
from kernels.reference import ReferenceKernels
from kernels.select import select_kernels

CPU = torch.device("cpu")
TINY = ModelShape("tiny", hidden=64, intermediate=96, num_heads=6, num_kv_heads=2, head_dim=16)
KERNELS = {"paged_decode", "paged_prefill", "rope_store", "gather_kv", "splice_kv", "add_rms_norm", "silu_mul"}


def tiny_bench(kernels="reference", formats=(torch.bfloat16,)) -> Bench:
    decodes, prefills = (((1, 40), (1, 40)),), (((20, 20),), ((7, 50),))
    return Bench(TINY, select_kernels(kernels, CPU), CPU, decodes, prefills, tokens=33, formats=formats)


def test_the_floor_is_the_longer_of_memory_and_products():
    speeds = Speeds(bandwidth=1e9, peak=1e12)
    assert (Work(2000, 1000).floor(speeds), Work(2000, 1000).bound(speeds)) == (2e-6, "memory")
    assert (Work(2000, 10**7).floor(speeds), Work(2000, 10**7).bound(speeds)) == (1e-5, "products")


@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 9), (5, 5), (3, 10)])
def test_pairs_are_counted_one_by_one(queries, context):
    counted = sum(token <= place for place in range(context - queries, context) for token in range(context))
    assert seen_pairs(queries, context) == counted


def test_work_of_llama_8b():
    decode = attention_work(LLAMA_8B, ((1, 1024),) * 8, 2)
    assert decode == Work(8 * (2 * 1024 * 8 * 128 * 2 + 2 * 32 * 128 * 2), 8 * 4 * 1024 * 4096)
    assert attention_work(LLAMA_8B, ((1, 1024),), 1).bytes < 0.51 * attention_work(LLAMA_8B, ((1, 1024),), 2).bytes
    assert rope_store_work(LLAMA_8B, 3, 1).bytes == 3 * ((4096 + 2048) * 2 + 512 + 4096 * 2 + 2048)
    assert add_rms_norm_work(LLAMA_8B, 3).bytes == 4 * 3 * 4096 * 2
    assert silu_mul_work(LLAMA_8B, 3).bytes == 3 * 3 * 14336 * 2
    assert move_work(LLAMA_8B, 3, 2).bytes == 2 * 2 * 3 * 1024 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_device_it_says_what_is_missing(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kernel_bench: no CUDA device: ")
    assert "--device cpu" in said.err


def test_kernels_that_cannot_run_here_are_named(capsys):
    assert main(["--device", "cpu", "--kernels", "triton"]) == 2
    assert "triton kernels need a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_every_kernel_is_a_case_and_all_attentions_agree(kernels):
    cases = list(tiny_bench(kernels).cases())
    assert {case.kernel for case in cases} == KERNELS
    attentions = [case for case in cases if case.others]
    assert [case.kernel for case in attentions] == ["paged_decode", "paged_prefill", "paged_prefill"]
    for case in attentions:
        check_same(case, "sdpa", case.others["sdpa"]())
    for case in cases:
        case.ours()
        assert case.work.bytes > 0


def test_float8_pools_are_cases_of_their_own():
    cases = list(tiny_bench(formats=(torch.bfloat16, FLOAT8)).cases())
    stored = [case for case in cases if case.stored == FLOAT8]
    assert {case.kernel for case in stored} == KERNELS - {"add_rms_norm", "silu_mul"}
    for case in stored:
        case.ours()
        (plain,) = [c for c in cases if (c.kernel, c.shape, c.stored) == (case.kernel, case.shape, torch.bfloat16)]
        assert case.work.bytes < plain.work.bytes


def test_an_attention_that_computes_something_else_is_not_timed():
    case = next(tiny_bench().cases())
    wrong = replace(case, others={"sdpa": lambda: case.ours() * 1.1})
    with pytest.raises(ValueError, match=r"paged_decode 2 x 40: sdpa differs from ours by 0\.1"):
        measure(wrong, "tiny", BenchDevice(CPU, rounds=1))


class FakeFlashInfer:
    """The part of FlashInfer's API in use (its documentation, flashinfer.decode and flashinfer.prefill): attends by the
    page tables that it is planned with, so tables that are wrong give a wrong result."""

    def __init__(self):
        self.BatchDecodeWithPagedKVCacheWrapper = lambda workspace, layout: self.Wrapper(layout, self.plan_decode)
        self.BatchPrefillWithPagedKVCacheWrapper = lambda workspace, layout: self.Wrapper(layout, self.plan_prefill)

    class Wrapper:
        def __init__(self, layout, plan):
            assert layout == "NHD"
            self.plan = lambda *args, **kwargs: setattr(self, "rows", plan(*args, **kwargs))

        def run(self, query, pools):
            scale = query.shape[-1] ** -0.5
            return ReferenceKernels().paged_prefill(query, *pools, self.rows, scale, None)

    @classmethod
    def plan_decode(cls, indptr, indices, last_page_len, heads, kv_heads, dim, page_size, *, q_data_type, kv_data_type):
        starts = torch.arange(len(indptr), dtype=torch.int32)
        sizes = heads, kv_heads, dim, page_size
        dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        return cls.plan_prefill(starts, indptr, indices, last_page_len, *sizes, causal=True, **dtypes)

    @staticmethod
    def plan_prefill(
        starts, indptr, indices, last_page_len, heads, kv_heads, dim, page_size, *, causal, q_data_type, kv_data_type
    ):
        assert (heads, kv_heads, dim, page_size) == (TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, BLOCK_SIZE)
        assert causal
        assert q_data_type == kv_data_type == torch.bfloat16
        assert {x.dtype for x in (starts, indptr, indices, last_page_len)} == {torch.int32}
        pages = indptr.diff()
        contexts = (pages - 1) * page_size + last_page_len
        tables = torch.nn.utils.rnn.pad_sequence(indices.split(pages.tolist()), batch_first=True)
        lens = starts.diff().tolist(), contexts.tolist()
        return kernel_cases.RaggedRows(starts, contexts, tables, *map(tuple, lens))


@pytest.mark.parametrize(("rows", "kernel"), [(((1, 40), (1, 40)), "paged_decode"), (((7, 50),), "paged_prefill")])
def test_flashinfer_is_planned_with_the_right_pages(rows, kernel):
    bench = tiny_bench()
    world = PagedWorld(bench, rows, torch.bfloat16)
    theirs = world.flashinfer(FakeFlashInfer(), is_decode=kernel == "paged_decode")()
    attend = getattr(bench.kernels, kernel)
    ours = attend(world.query, world.k_pool, world.v_pool, world.rows, TINY.head_dim**-0.5, None)
    torch.testing.assert_close(theirs, ours, atol=2e-2, rtol=2e-2)


def test_flashinfer_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert kernel_cases.find_flashinfer() is None
    library = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    assert kernel_cases.find_flashinfer() is library


def test_a_whole_run_on_a_cpu_prints_a_line_a_case_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernel_bench, "MODELS", (TINY,))
    monkeypatch.setattr(kernel_bench, "bench_of", lambda model, kernels, device: tiny_bench())
    before = torch.get_num_threads()
    try:
        arguments = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--json", str(tmp_path / "out.json")]
        assert main([*arguments, "--only", "paged"]) == 0
    finally:
        torch.set_num_threads(before)
    about, _, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith("device: cpu, threads: 1; kernels: ")
    assert len(lines) == 3
    found = json.loads((tmp_path / "out.json").read_text())
    assert [result["kernel"] for result in found["results"]] == ["paged_decode", "paged_prefill", "paged_prefill"]
    for result in found["results"]:
        assert result["seconds"] > 0 < result["floor"]
        assert set(result["others"]) == {"sdpa"}
        assert result["speeds"]["bandwidth"] > 0


def test_a_line_shows_ratios_and_what_is_missing():
    speeds = Speeds(2e9, 3e12)
    result = kernel_bench.Result("m", "k", "s", "bfloat16", 4e-6, 2e-6, "memory", {"sdpa": 6e-6}, speeds)
    assert line(result).split() == [
        "m",
        "k",
        "s",
        "bfloat16",
        "4.0",
        "2.0",
        "2.00",
        "memory",
        "2",
        "3.00",
        "6.0",
        "1.50",
        "-",
        "-",
    ]
