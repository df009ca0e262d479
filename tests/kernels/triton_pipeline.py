"""The whole forward with Triton kernels against the one with reference kernels: the same greedy tokens."""

import random

from engine.loading import load
from tests.engine.greedy_loop import GreedyLoop, make_runner
from tests.engine.test_cuda_graphs import graph_runner, replay_by_running
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

BACKENDS = ("reference", "triton")


def check_greedy_tokens(name, folder, device, num_new, padded=False, kv_cache_dtype="auto"):
    """In float32, on chunks that end inside blocks, over a pool that is NaN wherever no token is."""
    rng = random.Random(name)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (20, 1, 9)]
    checkpoint = save_tiny_model(name, folder)
    reference, triton = (
        load(checkpoint, dtype="float32", device=device, kernels=name, kv_cache_dtype=kv_cache_dtype)
        for name in BACKENDS
    )
    expected = GreedyLoop(make_runner(reference, num_blocks=20, block_size=8), 7, num_new).run(prompts)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "outputs must depend on the prompt"
    assert GreedyLoop(make_runner(triton, num_blocks=20, block_size=8), 7, num_new).run(prompts) == expected
    if padded:  # as a graph has them: also the host's lengths are not the rows' own
        runner = graph_runner(triton, 20, 8, replay_by_running)
        assert GreedyLoop(runner, 7, num_new).run(prompts) == expected
