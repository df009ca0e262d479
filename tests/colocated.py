"""The oracle: one engine in one process, prompts and outputs in the same batches. No sockets, no transfer, no roles."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.assembly import Engine, assemble
from engine.config import EngineConfig
from engine.request import Request, RequestState, ScheduledRow
from engine.stopping import finish_reason
from kvtransfer.request_parts import EndReason, RequestSpec, SamplingParams


@dataclass(frozen=True)
class Generated:
    """Output tokens of one request and why they end."""

    token_ids: list[int]
    reason: EndReason


class Colocated:
    """Chunked prefill and continuous batching over `engine.runner.Runner`, first come first served."""

    def __init__(self, engine: Engine, chunk_tokens: int) -> None:
        self._engine = engine
        self._chunk_tokens = chunk_tokens

    @classmethod
    def load(cls, model: Path, *, chunk_tokens: int = 64, **settings) -> "Colocated":
        """`settings` are fields of EngineConfig; the dtype is float32 unless they say otherwise."""
        config = EngineConfig(**{"model": str(model), "dtype": "float32", "device": "cpu", **settings})
        return cls(assemble(config, model, chunk_tokens), chunk_tokens)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Generated]:
        """Runs all prompts together to their ends; the pool is empty before and after."""
        requests = [
            Request(RequestSpec(f"r{i}", 0, tuple(prompt), params), gateway="test")
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]
        for request in requests:
            room = request.num_prompt + request.sampling.max_tokens
            request.block_ids = self._engine.pool.allocate(room, owner=request.key)
            request.move(RequestState.RUNNING)
        while running := [request for request in requests if request.state is RequestState.RUNNING]:
            self._step(running)
        self._engine.pool.check_integrity([])
        return [Generated(request.output_token_ids, request.end_reason) for request in requests]

    def _step(self, running: Sequence[Request]) -> None:
        rows = self._schedule(running)
        for row, token_id in zip(rows, self._engine.runner.step(rows).token_ids, strict=True):
            row.request.num_computed = row.stop
            if token_id is not None:
                self._append(row.request, token_id)

    def _schedule(self, running: Sequence[Request]) -> list[ScheduledRow]:
        """Running outputs take part always, prompts share what is left of the budget."""
        decoding = [request for request in running if request.output_token_ids]
        rows = [ScheduledRow(request, request.num_computed, 1) for request in decoding]
        budget = self._chunk_tokens
        for request in running:
            count = min(budget, request.num_prompt - request.num_computed)
            if count > 0 and not request.output_token_ids:
                rows.append(ScheduledRow(request, request.num_computed, count))
                budget -= count
        return rows

    def _append(self, request: Request, token_id: int) -> None:
        request.output_token_ids.append(token_id)
        engine = self._engine
        request.end_reason = finish_reason(request, engine.eos_token_ids, engine.max_model_len)
        if request.end_reason is not None:
            engine.pool.free(request.block_ids, owner=request.key)
            request.block_ids = []
            request.move(RequestState.ENDED)
