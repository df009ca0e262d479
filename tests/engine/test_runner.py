"""Our forward against transformers in float32: the same greedy tokens, however the work is cut into steps."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.loading import LoadedModel, load
from engine.request import ScheduledRow
from tests.engine.greedy_loop import GreedyLoop, make_request, make_runner
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE

NUM_NEW = 10
PROMPT_LENGTHS = (70, 1, 33, 17)
MISTRAL_WINDOW = 24


def make_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(str(lengths))
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


Reference = Callable[[str, tuple[int, ...]], list[list[int]]]


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Callable[[str], Path]) -> Reference:
    """What transformers' generate adds to each of the prompts, one prompt at a time."""

    @cache
    def generate(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(name), dtype=torch.float32)
        model.generation_config.eos_token_id = None
        outputs = []
        for prompt in make_prompts(lengths):
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
            )
            outputs.append(output[0, len(prompt) :].tolist())
        return outputs

    return generate


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens_equal_transformers(name, chunk, block_size, tiny_loaded, reference):
    expected = reference(name, PROMPT_LENGTHS)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPT_LENGTHS), "outputs must depend on the prompt"
    runner = make_runner(tiny_loaded(name), num_blocks=200 // block_size + 8, block_size=block_size)
    assert GreedyLoop(runner, chunk, NUM_NEW).run(make_prompts(PROMPT_LENGTHS)) == expected


@pytest.mark.parametrize("chunk", [5, 24, 64])
def test_lengths_around_the_window(chunk, tiny_loaded, reference):
    lengths = tuple(base + step for base in (MISTRAL_WINDOW, 2 * MISTRAL_WINDOW) for step in (-1, 0, 1))
    runner = make_runner(tiny_loaded("mistral"), num_blocks=120, block_size=4)
    assert GreedyLoop(runner, chunk, NUM_NEW).run(make_prompts(lengths)) == reference("mistral", lengths)


def test_blocks_of_ended_requests_are_reused_without_a_trace(tiny_loaded, reference):
    runner = make_runner(tiny_loaded("qwen2"), num_blocks=30, block_size=4)
    for _ in range(3):
        for prompt, expected in zip(make_prompts(PROMPT_LENGTHS), reference("qwen2", PROMPT_LENGTHS), strict=True):
            assert GreedyLoop(runner, 16, NUM_NEW).run([prompt]) == [expected]


def test_only_rows_that_reach_the_last_token_sample(tiny_loaded):
    runner = make_runner(tiny_loaded("llama2"), num_blocks=8, block_size=8)
    first, second = make_request("a", range(5, 15), [0, 1]), make_request("b", range(5, 25), [2, 3, 4])
    assert runner.step([ScheduledRow(second, 0, 8), ScheduledRow(first, 0, 4)]).token_ids == [None, None]
    sampled = runner.step([ScheduledRow(second, 8, 1), ScheduledRow(first, 4, 6)]).token_ids
    assert sampled[0] is None
    assert isinstance(sampled[1], int)


def test_order_of_results_is_the_order_of_rows(tiny_loaded, reference):
    runner = make_runner(tiny_loaded("llama2"), num_blocks=12, block_size=16)
    long, single, *_ = make_prompts(PROMPT_LENGTHS)
    expected_long, expected_single, *_ = (tokens[0] for tokens in reference("llama2", PROMPT_LENGTHS))
    rows = [ScheduledRow(make_request("a", long, range(5)), 0, 70), ScheduledRow(make_request("b", single, [5]), 0, 1)]
    assert runner.step(rows).token_ids == [expected_long, expected_single]
    assert runner.step(rows[::-1]).token_ids == [expected_single, expected_long]


def test_step_does_not_change_requests(tiny_loaded):
    runner = make_runner(tiny_loaded("llama2"), num_blocks=4, block_size=16)
    request = make_request("a", range(5, 15), [2])
    runner.step([ScheduledRow(request, 0, 10)])
    assert (request.output_token_ids, request.block_ids, request.num_computed) == ([], [2], 0)


def test_on_layer_comes_in_order_and_finds_its_kv_in_the_pool(tiny_loaded):
    runner = make_runner(tiny_loaded("qwen3"), num_blocks=6, block_size=4)
    request = make_request("a", range(5, 15), [4, 0, 2])
    seen: list[torch.Tensor] = []

    def on_layer(layer: int) -> None:
        assert layer == len(seen)
        assert not runner.kv_cache.gather(layer, request.block_ids, 0, 10)[0].isnan().any()
        if layer + 1 < runner.kv_cache.layout.num_layers:
            assert runner.kv_cache.gather(layer + 1, request.block_ids, 0, 10)[0].isnan().all()
        seen.append(torch.stack(runner.kv_cache.gather(layer, request.block_ids, 0, 10)))

    runner.step([ScheduledRow(request, 0, 10)], on_layer)
    assert len(seen) == 3
    for layer, early in enumerate(seen):
        assert torch.equal(early, torch.stack(runner.kv_cache.gather(layer, request.block_ids, 0, 10)))


def test_kv_spliced_from_another_block_size_continues_the_request(tiny_loaded, reference):
    prompt, expected = make_prompts(PROMPT_LENGTHS)[0], reference("llama3", PROMPT_LENGTHS)[0]
    prefill = make_runner(tiny_loaded("llama3"), num_blocks=10, block_size=16)
    decode = make_runner(tiny_loaded("llama3"), num_blocks=20, block_size=5)
    source, target = make_request("a", prompt, [9, 1, 3, 0, 2]), make_request("a", prompt, range(19, 2, -1))
    target.output_token_ids = [
        token for token in prefill.step([ScheduledRow(source, 0, 70)]).token_ids if token is not None
    ]
    for layer in range(3):
        key, value = prefill.kv_cache.gather(layer, source.block_ids, 0, 70)
        decode.kv_cache.splice(layer, target.block_ids, 0, 70, key, value)
    while len(target.output_token_ids) < NUM_NEW:
        (token_id,) = decode.step([ScheduledRow(target, target.num_tokens - 1, 1)]).token_ids
        target.output_token_ids.append(token_id)
    assert target.output_token_ids == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype, tiny_checkpoint, tiny_loaded, kernels):
    prompt = make_prompts(PROMPT_LENGTHS)[0]
    logits: list[torch.Tensor] = []

    def keep(rows: torch.Tensor, _: object) -> list[int]:
        logits.append(rows)
        return [0]

    for loaded in (tiny_loaded("llama2"), load(tiny_checkpoint("llama2"), dtype=dtype, device="cpu", kernels=kernels)):
        runner = make_runner(loaded, num_blocks=5, block_size=16, sample=keep)
        runner.step([ScheduledRow(make_request("a", prompt, range(5)), 0, 70)])
    assert loaded.fingerprint.dtype == dtype
    assert torch.nn.functional.cosine_similarity(*logits).item() > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens_on_the_gpu(name, tiny_checkpoint, reference):
    loaded: LoadedModel = load(tiny_checkpoint(name), dtype="float32", device="cuda", kernels="auto")
    runner = make_runner(loaded, num_blocks=60, block_size=16)
    prompts = make_prompts(PROMPT_LENGTHS)
    assert GreedyLoop(runner, 7, NUM_NEW).run(prompts) == reference(name, PROMPT_LENGTHS)
