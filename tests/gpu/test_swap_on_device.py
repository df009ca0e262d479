"""KV blocks to pinned memory and back beside a busy device: the copies see what was computed before them, and what is
computed next sees them."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from engine.block_mover import HostBlocks  # noqa: E402
from engine.block_moves import BlockMove, Route  # noqa: E402
from engine.cuda_lane import CudaLane  # noqa: E402
from engine.kv_cache import KvCache  # noqa: E402
from kernels.select import select_kernels  # noqa: E402
from kvtransfer.worker_facts import KvLayout  # noqa: E402

CUDA = torch.device("cuda")
NUM_BLOCKS = 64


def test_blocks_go_out_and_come_back_between_computations():
    cache = KvCache(KvLayout(8, 8, 128, "bfloat16", 16), NUM_BLOCKS, select_kernels("auto", CUDA), CUDA)
    host = HostBlocks(cache, NUM_BLOCKS, CudaLane(CUDA))
    busy = torch.randn(4096, 4096, device=CUDA)
    expected = torch.arange(NUM_BLOCKS, dtype=torch.float32, device=CUDA)
    for number in range(20):
        for _ in range(10):
            busy = busy @ busy / 4096
        values = (expected + number).to(torch.bfloat16)
        cache._pool.copy_(values[None, None, :, None, None, None].expand_as(cache._pool))  # asked for, not waited for
        first, second = number % 32, 32 + number % 32
        host.carry_out(
            [
                BlockMove(Route.OUT, first, number),
                BlockMove(Route.OUT, second, 40),
                BlockMove(Route.IN, number, second),
                BlockMove(Route.IN, 40, first),
            ]
        )
        after = cache._pool[0, 0, :, 0, 0, 0].clone()  # the computation's own stream
        host.settle()
        wanted = values.clone()
        wanted[[first, second]] = values[[second, first]]
        assert torch.equal(after, wanted)
