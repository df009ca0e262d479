"""Greedy tokens through HTTP, prefill, KV transfer and decode equal Hugging Face's, token for token, in float32."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtransfer.request_parts import EndReason, SamplingParams
from tests.colocated import Colocated
from tests.e2e.client import complete, stream
from tests.e2e.cluster import Cluster, ClusterFlags, running_cluster
from tests.e2e.prompts import LONG_PROMPT_TOKENS, PROMPTS, long_prompt
from tests.e2e.reference import Reference, ReferenceModel, torch_threads
from tests.tiny_models import MAX_POSITIONS, TINY_MODELS, VOCAB_SIZE, save_tiny_model

LONG = "ship's log of 3,000 tokens"
FEW = ("english fact", "polish", "emoji", "python", "whitespace")
REPLACEMENT = "\ufffd"
Case = tuple[Sequence[int], int, Reference]
"""Prompt token ids, max_tokens, what transformers generates."""


@pytest.fixture(scope="module")
def cases(smollm2):
    """Name -> Case."""
    with torch_threads(1):
        model = ReferenceModel(smollm2)
        encode = model.tokenizer.encode
        prompts = {p.name: (encode(p.text, add_special_tokens=False), p.max_tokens) for p in PROMPTS}
        prompts[LONG] = (long_prompt(model.tokenizer), 8)
        return {name: (ids, count, model.generate(ids, count)) for name, (ids, count) in prompts.items()}


def assert_same(answer, prompt: Sequence[int], reference: Reference) -> None:
    # A character cut off by max_tokens is shown as U+FFFD or left out; the number of tokens tells both apart from loss.
    assert answer.text.rstrip(REPLACEMENT) == reference.text.rstrip(REPLACEMENT)
    assert answer.usage["completion_tokens"] == len(reference.token_ids)
    assert answer.usage["prompt_tokens"] == len(prompt)
    assert answer.finish_reason == reference.finish_reason


def test_the_prompts_are_twenty_and_decided_by_more_than_rounding(cases):
    assert len(cases) == 20
    assert len(cases[LONG][0]) == LONG_PROMPT_TOKENS == 3000
    assert min(reference.margin for _, _, reference in cases.values()) > 2e-3


def assert_all_same(cluster: Cluster, cases: Sequence[Case]) -> None:
    """Sends all at once, eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: complete(cluster.http, list(case[0]), max_tokens=case[1]), cases))
    for answer, (prompt, _, reference) in zip(answers, cases, strict=True):
        assert_same(answer, prompt, reference)
    cluster.wait_pools_empty()


def test_twenty_prompts_through_the_whole_pipeline(cluster, cases):
    assert_all_same(cluster, list(cases.values()))


def test_string_prompts_and_streams_say_the_same(cluster, cases):
    prompts = [prompt for prompt in PROMPTS if prompt.name in FEW]
    with ThreadPoolExecutor(len(FEW)) as pool:
        answers = list(pool.map(lambda p: stream(cluster.http, p.text, max_tokens=p.max_tokens), prompts))
    for answer, prompt in zip(answers, prompts, strict=True):
        token_ids, _, reference = cases[prompt.name]
        assert_same(answer, token_ids, reference)


def test_small_chunks_and_different_block_sizes(small_chunk_cluster, cases):
    """Chunks of 64; blocks of 16 on prefill, 32 on decode. The long prompt takes 47 chunks."""
    assert_all_same(small_chunk_cluster, [cases[name] for name in (*FEW, LONG)])


@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(16, 64), (32, 512)])
def test_the_colocated_oracle(smollm2, cases, block_size, chunk_tokens):
    with torch_threads(1):
        oracle = Colocated.load(smollm2, chunk_tokens=chunk_tokens, block_size=block_size, kv_cache_gib=0.5)
        chosen = [case for name, case in cases.items() if chunk_tokens == 512 or name != LONG]
        sampling = [SamplingParams(max_tokens=count, seed=0, temperature=0.0) for _, count, _ in chosen]
        generated = oracle.generate([prompt for prompt, _, _ in chosen], sampling)
    assert [g.token_ids for g in generated] == [reference.token_ids for _, _, reference in chosen]
    assert [g.reason for g in generated] == [EndReason(reference.finish_reason) for _, _, reference in chosen]


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_each_architecture(architecture, tmp_path):
    """Blocks of 32 on prefill, 16 on decode. Tokens other than printable ASCII characters are suppressed on both sides,
    so that equal text is equal tokens."""
    folder = save_tiny_model(architecture, tmp_path / "model")
    model = ReferenceModel(folder)
    suppressed = [token_id for token_id in range(VOCAB_SIZE) if not is_one_character(model, token_id)]
    prompts = [[5 + (7 * i + 3 * i * i) % 300 for i in range(length)] for length in (1, 15, 33, 200)]
    prompts.append([5 + (31 * i + i * i) % 300 for i in range(MAX_POSITIONS - 40)])
    flags = ClusterFlags(
        folder,
        workers=("--dtype", "float32", "--kv-cache-gib", "0.05"),
        prefill=("--max-num-batched-tokens", "64", "--block-size", "32"),
        decode=("--block-size", "16"),
    )
    bias = {str(token_id): -100 for token_id in suppressed}
    with running_cluster(flags, tmp_path) as running:
        for prompt in prompts:
            with torch_threads(1):
                reference = model.generate(prompt, 32, suppressed)
            assert reference.margin > 1e-3
            answer = complete(running.http, prompt, max_tokens=32, logit_bias=bias)
            assert_same(answer, prompt, reference)
            assert REPLACEMENT not in answer.text
        running.wait_pools_empty()


def test_float8_kv_through_the_whole_pipeline(tmp_path):
    """Bytes of a float8 pool from blocks of 32 to blocks of 16: the same tokens as in one process with one pool."""
    folder = save_tiny_model("smollm2", tmp_path / "model")
    prompts = [[5 + (7 * i + 3 * i * i) % 300 for i in range(length)] for length in (1, 33, 200)]
    settings = {"kv_cache_gib": 0.05, "kv_cache_dtype": "fp8", "kernels": "reference"}
    with torch_threads(1):
        oracle = Colocated.load(folder, chunk_tokens=64, **settings)
        sampling = [SamplingParams(max_tokens=24, seed=0, temperature=0.0, ignore_eos=True)]
        expected = [oracle.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    tokenizer = ReferenceModel(folder).tokenizer
    flags = ClusterFlags(
        folder,
        workers=("--dtype", "float32", "--kv-cache-gib", "0.05", "--kv-cache-dtype", "fp8", "--kernels", "reference"),
        prefill=("--max-num-batched-tokens", "64", "--block-size", "32"),
        decode=("--block-size", "16"),
    )
    with running_cluster(flags, tmp_path) as running:
        for prompt, token_ids in zip(prompts, expected, strict=True):
            answer = complete(running.http, prompt, max_tokens=24, ignore_eos=True)
            assert answer.usage["completion_tokens"] == 24
            decoded = tokenizer.decode(token_ids, skip_special_tokens=True)
            assert answer.text.rstrip(REPLACEMENT) == decoded.rstrip(REPLACEMENT)
        running.wait_pools_empty()


def is_one_character(model: ReferenceModel, token_id: int) -> bool:
    text = model.tokenizer.decode([token_id])
    return len(text) == 1 and text.isascii() and text.isprintable()
