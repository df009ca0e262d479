"""KV beside the computation on a device: the staged source and sink against their slow twins, on a busy device."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from decode.staged_sink import StagedSink  # noqa: E402
from engine.cuda_lane import CudaLane  # noqa: E402
from engine.kv_cache import KvCache  # noqa: E402
from kernels.select import select_kernels  # noqa: E402
from kvtransfer.kv_messages import KvHeader  # noqa: E402
from kvtransfer.layout import FP8  # noqa: E402
from kvtransfer.outgoing import Piece  # noqa: E402
from kvtransfer.worker_facts import KvLayout  # noqa: E402
from prefill.staged_source import StagedSource  # noqa: E402
from prefill.worker import PoolSource  # noqa: E402

CUDA = torch.device("cuda")
KEY, NUM_TOKENS, NUM_LAYERS = ("r", 0), 500, 4
BLOCKS = [*range(40, 8, -1)]
JOBS = SimpleNamespace(find=lambda key: SimpleNamespace(block_ids=BLOCKS))


def pool():
    layout = KvLayout(NUM_LAYERS, 8, 128, "bfloat16", 16)
    cache = KvCache(layout, 64, select_kernels("auto", CUDA), CUDA)
    cache.fill(0.0)
    return SimpleNamespace(kv_cache=cache, layout=layout)


def compute(engine, busy: torch.Tensor, layer: int) -> None:
    """Something that takes a while, and then a layer's KV, all of it asked for and not waited for."""
    for _ in range(20):
        busy = busy @ busy
    k, v = (torch.randn(NUM_TOKENS, 8, 128, device=CUDA).to(torch.bfloat16) for _ in "kv")
    engine.kv_cache.splice(layer, BLOCKS, 0, NUM_TOKENS, k, v)


@pytest.mark.parametrize("dtype", [None, FP8])
def test_kv_goes_from_pool_to_pool_while_the_device_computes(dtype):
    ours, theirs = pool(), pool()
    source, sink = StagedSource(ours, JOBS, CudaLane(CUDA)), StagedSink(theirs, JOBS, CudaLane(CUDA))
    busy = torch.randn(4096, 4096, device=CUDA)
    for layer in range(NUM_LAYERS):
        compute(ours, busy, layer)
        source.mark_layer(layer)
    for layer in range(NUM_LAYERS):
        for start, stop in ((0, 100), (100, 356), (356, NUM_TOKENS)):
            body = source.gather(KEY, Piece(layer, start, stop, dtype))
            sink.splice(KEY, KvHeader(*KEY, layer, start, stop, 0, 8, dtype or "bfloat16"), body)
    sink.finish(KEY)
    for layer in range(NUM_LAYERS):
        piece = Piece(layer, 0, NUM_TOKENS)
        here, there = (PoolSource(engine, JOBS).gather(KEY, piece) for engine in (ours, theirs))
        if dtype is None:
            assert (bytes(here.k), bytes(here.v)) == (bytes(there.k), bytes(there.v))
        else:
            wanted, found = (torch.frombuffer(part.k, dtype=torch.bfloat16).float() for part in (here, there))
            assert float((found - wanted).norm() / wanted.norm()) < 0.03
