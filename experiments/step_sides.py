"""The contestants of `bench_step`: our engine with one backend or another, and transformers' batched forward.

Each is given the same work and returns the next token of every row, picked greedily: a whole step, not a forward alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine.block_pool import blocks_for
from engine.loading import load
from engine.request import Request, ScheduledRow
from engine.runner import Runner
from engine.sampler import Sampler
from kvtransfer.request_parts import RequestSpec, SamplingParams

Step = Callable[[], object]

_BLOCK_SIZE: Final = 16
_TOKEN: Final = 100
"""An ordinary token: what is computed does not depend on which."""


class Side(Protocol):
    """Makes steps that may be run any number of times."""

    name: str

    def decode(self, batch: int, context: int) -> Step:
        """One token for each of `batch` rows whose contexts, that token included, are `context` long."""
        ...

    def prefill(self, tokens: int) -> Step:
        """One prompt in one chunk, and its first output token."""
        ...


class EngineSide:
    """Our runner and sampler over a pool of random K and V."""

    def __init__(self, model: Path, kernels: str) -> None:
        self._loaded = load(model, dtype="bfloat16", device="cpu", kernels=kernels)
        self.name = f"kvsplice ({self._loaded.kernels.name})"

    def decode(self, batch: int, context: int) -> Step:
        return self._step([(context, 1)] * batch)

    def prefill(self, tokens: int) -> Step:
        return self._step([(tokens, tokens)])

    def _step(self, shapes: list[tuple[int, int]]) -> Step:
        """`shapes`: (context length, tokens to compute) of each row."""
        loaded = self._loaded
        blocks = sum(blocks_for(context, _BLOCK_SIZE) for context, _ in shapes)
        kv_cache = loaded.make_kv_cache(blocks, _BLOCK_SIZE)
        for layer in range(loaded.config.num_layers):
            for pool in kv_cache.layer(layer):
                pool.normal_()
        sampler = Sampler(loaded.config.vocab_size, loaded.eos_token_ids, loaded.device, loaded.kernels.sampling)
        runner = Runner(loaded.model, loaded.kernels, kv_cache, sampler)
        rows = _rows(shapes)
        return lambda: runner.step(rows).token_ids


def _rows(shapes: list[tuple[int, int]]) -> list[ScheduledRow]:
    rows, next_block = [], 0
    for index, (context, count) in enumerate(shapes):
        spec = RequestSpec(f"r{index}", 0, (_TOKEN,) * context, SamplingParams(max_tokens=1, seed=0, temperature=0.0))
        num_blocks = blocks_for(context, _BLOCK_SIZE)
        request = Request(spec, gateway="", block_ids=list(range(next_block, next_block + num_blocks)))
        next_block += num_blocks
        rows.append(ScheduledRow(request, start=context - count, count=count))
    return rows


class TransformersSide:
    """Hugging Face's model with its defaults for a CPU: SDPA attention, a cache that grows by concatenation."""

    name = "transformers"

    def __init__(self, model: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> Step:
        cache = DynamicCache(config=self._model.config)
        prompt = torch.full((batch, context - 1), _TOKEN)
        self._model(prompt, cache=cache, use_cache=True, logits_to_keep=1)
        return lambda: self._decode_once(cache, batch)

    @torch.inference_mode()
    def _decode_once(self, cache: DynamicCache, batch: int) -> list[int]:
        logits = self._model(torch.full((batch, 1), _TOKEN), cache=cache, use_cache=True).logits
        cache.crop(-1)
        ids: list[int] = logits[:, -1].argmax(-1).tolist()
        return ids

    def prefill(self, tokens: int) -> Step:
        return lambda: self._prefill_once(torch.full((1, tokens), _TOKEN))

    @torch.inference_mode()
    def _prefill_once(self, prompt: torch.Tensor) -> list[int]:
        logits = self._model(prompt, use_cache=True, logits_to_keep=1).logits
        ids: list[int] = logits[:, -1].argmax(-1).tolist()
        return ids
