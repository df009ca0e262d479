"""The whole forward with Triton kernels against the one with reference kernels: the same greedy tokens."""

import random

from engine.loading import load
from tests.engine.greedy_loop import GreedyLoop, make_runner
from tests.tiny_models import VOCAB_SIZE, save_tiny_model


def check_greedy_tokens(name, folder, device, num_new):
    """In float32, on chunks that end inside blocks, over a pool that is NaN wherever no token is."""
    rng = random.Random(name)
    prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (20, 1, 9)]
    checkpoint = save_tiny_model(name, folder)
    outputs = []
    for kernels in ("reference", "triton"):
        loaded = load(checkpoint, dtype="float32", device=device, kernels=kernels)
        runner = make_runner(loaded, num_blocks=20, block_size=8)
        outputs.append(GreedyLoop(runner, 7, num_new).run(prompts))
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == len(prompts), "outputs must depend on the prompt"
