"""Whole blocks to the host's memory and back: bit for bit, in order, and nothing else is touched."""

import pytest
import torch

from engine.block_mover import HostBlocks, allocate_host_blocks
from engine.block_moves import BlockMove, Route
from engine.errors import CapacityError
from engine.kv_cache import GIB, KvCache, bytes_per_block
from kernels.face import KvScales
from kernels.reference import ReferenceKernels
from kvtransfer.worker_facts import KvLayout
from tests.engine.fake_lane import FakeLane

NUM_BLOCKS = 6


def pool_of(dtype="float32"):
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype, block_size=4)
    scales = [KvScales(torch.ones(2), torch.ones(2))] * 3 if dtype == "float8_e4m3fn" else None
    pool = KvCache(layout, NUM_BLOCKS, ReferenceKernels(), torch.device("cpu"), scales=scales, with_scratch=True)
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, NUM_BLOCKS + 1, 4, 2, 8)
    pool._pool.view(torch.uint8).random_(0, 100, generator=generator)
    assert pool._pool.shape == shape
    return pool


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).clone()


def out(source, target):
    return BlockMove(Route.OUT, source, target)


def back(source, target):
    return BlockMove(Route.IN, source, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_blocks_come_back_bit_for_bit_and_no_other_is_touched(dtype):
    pool = pool_of(dtype)
    before = bits(pool._pool)
    host = HostBlocks(pool, 3)
    host.carry_out([out(1, 2), out(4, 0)])
    assert torch.equal(bits(pool._pool), before), "going out changes nothing"
    host.carry_out([back(2, 5), back(0, 3)])
    after = bits(pool._pool)
    for there, here in ((1, 5), (4, 3)):
        assert torch.equal(after[:, :, here], before[:, :, there])
    for other in (0, 1, 2, 4, NUM_BLOCKS):
        assert torch.equal(after[:, :, other], before[:, :, other])


def test_moves_are_done_in_order():
    pool = pool_of()
    before = bits(pool._pool)
    host = HostBlocks(pool, 1)
    host.carry_out([out(1, 0), back(0, 2), out(3, 0), back(0, 1)])
    after = bits(pool._pool)
    assert torch.equal(after[:, :, 2], before[:, :, 1])
    assert torch.equal(after[:, :, 1], before[:, :, 3])


def test_on_a_lane_the_copies_follow_the_computation_and_the_next_step_follows_them(monkeypatch):
    lane, pool = FakeLane(), pool_of()
    monkeypatch.setattr(torch, "empty", _pageable(torch.empty))
    host = HostBlocks(pool, 2, lane)
    before = bits(pool._pool)
    host.carry_out([out(1, 0), back(0, 2)])
    assert lane.log == [("follows", "mark 1"), ("recorded", 1), ("held back until", 1)]
    assert torch.equal(bits(pool._pool)[:, :, 2], before[:, :, 1])
    host.settle()
    host.settle()
    assert lane.log[3:] == [("waited for", 1)], "once"


def _pageable(empty):
    """Without a GPU no memory can be pinned; that it would have been is all that is asked."""

    def allocate(*args, pin_memory, **kwargs):
        assert pin_memory
        return empty(*args, **kwargs)

    return allocate


def test_the_size_is_given_in_gib():
    pool = pool_of()
    per_block = bytes_per_block(pool.layout) / GIB
    assert allocate_host_blocks(pool, 3.5 * per_block).num_blocks == 3
    assert allocate_host_blocks(pool, 0.0).num_blocks == 0
    with pytest.raises(CapacityError, match="does not hold one KV block"):
        allocate_host_blocks(pool, 0.5 * per_block)


def test_more_than_the_host_has_is_refused_in_words():
    with pytest.raises(CapacityError, match="lower --swap-space"):
        HostBlocks(pool_of(), 1 << 50)
