"""Runs one engine step: rows in, one sampled token for each row that is to go on. Knows no scheduler and no socket."""

from collections.abc import Callable, Sequence

import torch

from engine.batch import Batch, build_batch
from engine.cuda_graphs import DecodeGraphs
from engine.kv_cache import KvCache
from engine.model import CausalLm, OnLayer
from engine.request import Request, ScheduledRow
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

    def step(self, rows: Sequence[ScheduledRow], on_layer: OnLayer | None = None) -> list[int | None]:
        """Computes the K and V of all tokens of `rows` and returns, row by row, the next token id, or None where the
        row ends before its request's last token. `on_layer(i)` is called as soon as layer i's K and V are in the pool.

        Waits for the device in the sampler alone: for the ids, and for what decides how they are drawn.
        """
        assert rows, "a step needs at least one row"
        with torch.inference_mode():
            batch = build_batch(rows, self.kv_cache.block_size, self.kv_cache.device)
            sampling = [rows[index].request for index in batch.sample_rows]
            self._prepare(sampling)
            logits = self._forward(batch, on_layer)
            sampled = self._sample(logits, sampling) if len(logits) else []
        next_tokens: list[int | None] = [None] * len(rows)
        for index, token_id in zip(batch.sample_rows, sampled, strict=True):
            next_tokens[index] = token_id
        return next_tokens

    def _forward(self, batch: Batch, on_layer: OnLayer | None) -> torch.Tensor:
        """Logits of the tokens that sample; a recorded step cannot call back in its middle."""
        if self._graphs is not None and on_layer is None and self._graphs.takes(batch):
            return self._graphs.run(batch)
        logits: torch.Tensor = self._model(batch, self.kv_cache, self._kernels, on_layer)
        return logits
