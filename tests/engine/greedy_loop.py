"""A minimal loop around a Runner for tests: chunked prefill and continuous batching, greedy, on scattered blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.block_pool import BlockPool
from engine.loading import LoadedModel
from engine.request import Request, ScheduledRow
from engine.runner import Runner, Sample
from kvtransfer.request_parts import RequestSpec, SamplingParams


def argmax(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    assert logits.dtype == torch.float32
    assert len(logits) == len(requests)
    return logits.argmax(-1).tolist()


def make_request(name: str, prompt: Sequence[int], block_ids: Sequence[int] = ()) -> Request:
    spec = RequestSpec(name, 0, tuple(prompt), SamplingParams(max_tokens=1000, seed=0))
    return Request(spec, gateway="gateway", block_ids=list(block_ids))


def make_runner(loaded: LoadedModel, num_blocks: int, block_size: int, sample: Sample = argmax) -> Runner:
    """Over a pool full of NaN: whatever reads a slot that was not written shows."""
    kv_cache = loaded.make_kv_cache(num_blocks, block_size)
    kv_cache.fill(float("nan"))
    return Runner(loaded.model, loaded.kernels, kv_cache, sample)


@dataclass
class GreedyLoop:
    """Request i joins at step i, so prompt chunks and decode rows share batches."""

    runner: Runner
    chunk: int
    num_new: int
    running: list[Request] = field(default_factory=list)

    def run(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The `num_new` tokens that follow each prompt."""
        cache = self.runner.kv_cache
        pool = BlockPool(cache.num_blocks, cache.block_size)
        requests = [make_request(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
        waiting = list(requests)
        while waiting or self.running:
            if waiting:
                self._admit(waiting.pop(0), pool)
            self._step()
            for request in [r for r in self.running if len(r.output_token_ids) == self.num_new]:
                self.running.remove(request)
                pool.free(request.block_ids, request.key)
        return [request.output_token_ids for request in requests]

    def _admit(self, request: Request, pool: BlockPool) -> None:
        spare = pool.allocate(1, "spare")  # keeps the blocks of a request from lying in a row
        blocks = pool.allocate(request.num_prompt + self.num_new, request.key)
        pool.free(spare, "spare")
        request.block_ids = blocks[::-1]
        self.running.append(request)

    def _step(self) -> None:
        rows = [ScheduledRow(r, r.num_computed, min(self.chunk, r.num_uncomputed)) for r in self.running]
        for row, token_id in zip(rows, self.runner.step(rows).token_ids, strict=True):
            row.request.num_computed = row.stop
            assert (token_id is not None) == row.samples
            if token_id is not None:
                row.request.output_token_ids.append(token_id)
