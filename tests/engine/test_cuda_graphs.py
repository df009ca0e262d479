"""Recorded decode steps without a device: sizes, padding, and whose blocks the padding touches.

`replay_by_running` stands for recording: a step is run anew at each replay, on the fixed tensors that a graph reads.
"""

import dataclasses

import pytest
import torch

from engine.batch import build_batch
from engine.cuda_graphs import LARGEST_SIZE, DecodeGraphs, FixedRows, GraphLimits, GraphRecorder, batch_sizes, size_for
from engine.kv_cache import KvCache
from engine.loading import load
from engine.request import ScheduledRow
from engine.runner import Runner
from kernels.reference import ReferenceKernels
from kvtransfer.worker_facts import KvLayout
from tests.engine.greedy_loop import GreedyLoop, argmax, make_request, make_runner
from tests.engine.test_runner import make_prompts

CPU = torch.device("cpu")
LIMITS = GraphLimits(max_num_seqs=6, max_model_len=40)


def replay_by_running(step):
    return step


def make_cache(block_size=4, num_blocks=10):
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_size=block_size)
    return KvCache(layout, num_blocks, ReferenceKernels(), CPU, with_scratch=True)


def decode_batch(*contexts, block_size=4):
    rows = []
    for index, context in enumerate(contexts):
        blocks = range(index, index + 1 + context // block_size)
        rows.append(ScheduledRow(make_request(f"r{index}", range(100, 100 + context), blocks), context - 1, 1))
    return build_batch(rows, block_size, CPU)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 13, 64, 65, 100, 256, 512, 65536])
def test_sizes_hold_every_batch_and_waste_little(most):
    sizes = batch_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == min(most, LARGEST_SIZE)
    for count in range(1, sizes[-1] + 1):
        size = size_for(count, sizes)
        assert count <= size
        assert size - count < max(count, 2) if count < 8 else size - count < max(8, count // 2)
    assert size_for(sizes[-1] + 1, sizes) is None
    assert len(sizes) <= 32


def test_padding_is_one_token_in_the_scratch_block():
    cache = make_cache()
    rows = FixedRows(LIMITS, cache)
    rows.load(decode_batch(5, 9, 1), 4)
    batch = rows.batch(4)
    assert batch.token_ids.tolist() == [104, 108, 100, 0]
    assert batch.positions.tolist() == [4, 8, 0, 0]
    assert batch.slot_mapping.tolist() == [1 * 4, 3 * 4, 2 * 4, 10 * 4]
    assert batch.decode.context_lens.tolist() == [5, 9, 1, 1]
    assert batch.decode.block_tables[:2, :2].tolist() == [[0, 1], [1, 2]]
    assert batch.decode.block_tables[3].tolist() == [10] * 10
    assert cache.scratch_block == 10


def test_no_trace_of_a_larger_batch_before():
    fresh, used = FixedRows(LIMITS, make_cache()), FixedRows(LIMITS, make_cache())
    used.load(decode_batch(20, 9, 30, 4), 4)
    for rows in (fresh, used):
        rows.load(decode_batch(5), 4)
    expected, actual = fresh.batch(4), used.batch(4)
    for field in ("token_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(actual, field), getattr(expected, field))
    assert torch.equal(actual.decode.context_lens, expected.decode.context_lens)
    assert torch.equal(actual.decode.block_tables[:, 0], expected.decode.block_tables[:, 0])


def test_host_lengths_are_upper_bounds():
    batch = FixedRows(LIMITS, make_cache()).batch(2)
    assert batch.decode.host_context_lens == (40, 40)


def test_sizes_share_their_tensors():
    rows = FixedRows(LIMITS, make_cache())
    assert rows.batch(1).token_ids.data_ptr() == rows.batch(6).token_ids.data_ptr()


def test_only_rows_that_sample_get_logits_and_prompts_run_eagerly():
    seen = []

    def forward(batch):
        seen.append(len(batch.token_ids))
        return batch.token_ids[:, None].float()

    graphs = DecodeGraphs(forward, make_cache(), LIMITS, lambda step: step)
    assert graphs.sizes == (1, 2, 4, 6)
    batch = decode_batch(3, 7, 2)
    batch = dataclasses.replace(batch, sample_tokens=torch.tensor([0, 2]))
    assert graphs.takes(batch)
    assert graphs.run(batch).flatten().tolist() == [102.0, 101.0]
    assert seen == [4]
    request = make_request("p", range(10), range(3))
    assert not graphs.takes(build_batch([ScheduledRow(request, 0, 10)], 4, CPU))
    assert not graphs.takes(decode_batch(*[1] * 7))


def test_sizes_are_recorded_largest_first():
    recorded = []

    def record(step):
        recorded.append(step())
        return step

    DecodeGraphs(lambda batch: torch.zeros(len(batch.token_ids)), make_cache(), LIMITS, record)
    assert [len(output) for output in recorded] == [6, 4, 2, 1]


def test_a_pool_without_a_scratch_block_is_refused():
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_size=4)
    with pytest.raises(AssertionError, match="scratch"):
        FixedRows(LIMITS, KvCache(layout, 10, ReferenceKernels(), CPU))


def graph_runner(loaded, num_blocks, block_size, record):
    """A runner over a pool full of NaN, with recorded steps."""
    cache = loaded.make_kv_cache(num_blocks, block_size, with_scratch=True)
    cache.fill(float("nan"))
    limits = GraphLimits(max_num_seqs=8, max_model_len=num_blocks * block_size)
    forward = lambda batch: loaded.model(batch, cache, loaded.kernels, None)  # noqa: E731
    return Runner(loaded.model, loaded.kernels, cache, argmax, DecodeGraphs(forward, cache, limits, record))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama2", "mistral", "qwen3"])
def test_recorded_steps_give_the_same_tokens_on_a_device(name, tiny_checkpoint):
    loaded = load(tiny_checkpoint(name), dtype="float32", device="cuda", kernels="triton")
    prompts = make_prompts((70, 1, 33))
    eager = GreedyLoop(make_runner(loaded, num_blocks=20, block_size=16), 16, 10).run(prompts)
    runner = graph_runner(loaded, 20, 16, GraphRecorder(loaded.device))
    assert GreedyLoop(runner, 16, 10).run(prompts) == eager
