"""Runs one engine step: rows in, one sampled token for each row that is to go on. Knows no scheduler and no socket."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import Batch, build_batch
from engine.cuda_graphs import DecodeGraphs
from engine.kv_cache import KvCache
from engine.logprobs import PromptScores, row_logprobs, sampled_logprobs
from engine.model import CausalLm, OnLayer, OnScores
from engine.request import Request, ScheduledRow, StepResult
from kernels.face import Kernels

Sample = Callable[[torch.Tensor, Sequence[Request]], list[int]]
"""Logits [R, vocab_size] float32 and the request of each row, to the next token id of each."""


class Runner:
    """Model, kernels, pool and sampler of one worker. Reads requests, never changes them."""

    def __init__(
        self,
        model: CausalLm,
        kernels: Kernels,
        kv_cache: KvCache,
        sample: Sample,
        graphs: DecodeGraphs | None = None,
        prepare: Callable[[Sequence[Request]], None] = lambda requests: None,
    ) -> None:
        """`graphs`: recorded from the same model over the same pool; without them every step runs eagerly. `prepare` is
        told before the forward who will sample."""
        self.kv_cache = kv_cache
        self._model = model
        self._kernels = kernels
        self._sample = sample
        self._graphs = graphs
        self._prepare = prepare

    def step(self, rows: Sequence[ScheduledRow], on_layer: OnLayer | None = None) -> StepResult:
        """Computes the K and V of all tokens of `rows` and returns, row by row, the next token id, or None where the
        row ends before its request's last token; and how likely tokens were, for those who ask. `on_layer(i)` is called
        as soon as layer i's K and V are in the pool.

        Waits for the device in the sampler alone, for the ids and for what decides how they are drawn, and where
        somebody asks how likely they were.
        """
        assert rows, "a step needs at least one row"
        with torch.inference_mode():
            batch = build_batch(rows, self.kv_cache.block_size, self.kv_cache.device)
            scores = PromptScores(rows)
            sampling = [rows[index] for index in batch.sample_rows]
            requests = [row.request for row in sampling]
            self._prepare(requests)
            logits = self._forward(batch, on_layer, scores.take)
            sampled = self._sample(logits, requests) if sampling else []
            told = sampled_logprobs(logits, sampling, sampled)
        next_tokens: list[int | None] = [None] * len(rows)
        for index, token_id in zip(batch.sample_rows, sampled, strict=True):
            next_tokens[index] = token_id
        by_row = {batch.sample_rows[index]: logprob for index, logprob in told.items()}
        return StepResult(next_tokens, row_logprobs(by_row, scores.by_row()))

    def _forward(self, batch: Batch, on_layer: OnLayer | None, on_scores: OnScores) -> torch.Tensor:
        """Logits of the tokens that sample; a recorded step cannot call back in its middle, or behind it."""
        may_replay = on_layer is None and batch.score_tokens is None
        if self._graphs is not None and may_replay and self._graphs.takes(batch):
            return self._graphs.run(batch)
        logits: torch.Tensor = self._model(batch, self.kv_cache, self._kernels, on_layer, on_scores)
        return logits
