"""The forward pass of the Llama family over a paged KV pool, read top to bottom.

Knows layers, a batch and a pool; no requests, no sampling, no files. One class serves all architectures: they differ
in biases, q/k norms and attention windows, which ModelConfig spells out.

    hidden = embed(tokens)
    each layer:   hidden += attention(norm(hidden))     K, V into the pool, then `on_layer`, then attention
                  hidden += mlp(norm(hidden))
    logits = lm_head(norm(hidden)), only for tokens that are to be followed by a new one, and before that for those
             of a prompt that is to be scored
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.batch import Batch
from engine.kv_cache import KvCache
from engine.logprobs import ROWS_AT_ONCE
from engine.model_config import ModelConfig
from kernels.face import DecodeStep, Kernels, LayerParts, LayerRun, PreparedBlock, PreparedLayers, PreparedLinear

OnLayer = Callable[[int], None]
"""Called with the layer's index when the batch's K and V of that layer are in the pool: before its attention, or behind
the layer where that is a single call."""
OnScores = Callable[[torch.Tensor], None]
"""Called with logits [n, vocab_size] float32 of the batch's next n `score_tokens`."""


def _parameter(*shape: int) -> nn.Parameter:
    """Uninitialised; `CausalLm.allocate` decides on device and dtype."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Block(nn.Module):
    """A module without hooks, so that calling it costs no more than a function: a step makes hundreds of calls."""

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)


class Linear(nn.Module):
    """Holds the weight [out_features, in_features] and bias of a linear layer until the kernels take them."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def prepare(self, kernels: Kernels) -> PreparedLinear:
        """Hands the loaded weight to the backend, which lays it out as it likes, and lets go of it. Once."""
        prepared = kernels.prepare_linear(self.weight, self.bias)
        del self.weight, self.bias
        return prepared


class RmsNorm(Block):
    """Holds the weight of a norm; which kernel computes it is the caller's choice."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class ForwardContext:
    """What all layers of one forward share."""

    batch: Batch
    kv_cache: KvCache
    kernels: Kernels
    cos: torch.Tensor  # [T, head_dim / 2] float32, of each token's rotary angles
    sin: torch.Tensor
    on_layer: OnLayer | None


class Attention(Block):
    """Grouped-query attention of layer `index`; q, k and v come out of one product."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.window = config.windows[index]
        self.scale = config.head_dim**-0.5
        self.qkv = Linear(config.hidden_size, config.q_size + 2 * config.kv_size, config.qkv_bias)
        self.out = Linear(config.q_size, config.hidden_size, config.o_bias)
        self.query_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.key_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self._out: PreparedLinear | None = None

    def prepare(self, kernels: Kernels) -> PreparedLinear:
        self._out = self.out.prepare(kernels)
        return self._out

    def forward(self, fused: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The product of qkv, [T, q_size + 2 * kv_size], to [T, hidden]."""
        query, key, value = self._split(fused, context.kernels)
        k_pool, v_pool = context.kv_cache.layer(self.index)
        query = context.kernels.rope_store(
            query,
            key,
            value,
            context.cos,
            context.sin,
            k_pool,
            v_pool,
            context.batch.slot_mapping,
            context.kv_cache.scales(self.index),
        )
        if context.on_layer is not None:
            context.on_layer(self.index)
        assert self._out is not None, "prepare comes before the first forward"
        return self._out(self._attend(query, k_pool, v_pool, context).flatten(1))

    def _split(self, fused: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], not rotated yet."""
        config = self.config
        heads = fused.view(fused.shape[0], -1, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query, kernels), self.key_norm(key, kernels)
        return query, key, value

    def _attend(
        self, query: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The one place that chooses between the two attentions: rows of one token, and all others behind them."""
        batch, kernels = context.batch, context.kernels
        options = (self.scale, self.window, None, context.kv_cache.scales(self.index))
        if batch.prefill is None and batch.decode is not None:
            return kernels.paged_decode(query, k_pool, v_pool, batch.decode, *options)
        parts = []
        if batch.decode is not None:
            queries = query[: batch.num_decode]
            parts.append(kernels.paged_decode(queries, k_pool, v_pool, batch.decode, *options))
        if batch.prefill is not None:
            queries = query[batch.num_decode :]
            parts.append(kernels.paged_prefill(queries, k_pool, v_pool, batch.prefill, *options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202); gate and up come out of one product. Holds their weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)


class DecoderLayer(Block):
    """One pre-norm block. `hidden` is what the block before it added; `residual` is the sum of all before that."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, index)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)
        self._norm_qkv: PreparedBlock | None = None
        self._norm_mlp: PreparedBlock | None = None

    def prepare(self, kernels: Kernels) -> LayerParts:
        """The backend gets each part that begins with a norm as a whole, so that it may compute it in one call."""
        norm, qkv = self.attention_norm, self.attention.qkv.prepare(kernels)
        self._norm_qkv = kernels.norm_linear(norm.weight, norm.eps, qkv)
        out = self.attention.prepare(kernels)
        norm, gate_up, down = self.mlp_norm, self.mlp.gate_up.prepare(kernels), self.mlp.down.prepare(kernels)
        self._norm_mlp = kernels.norm_mlp(norm.weight, norm.eps, gate_up, down)
        return self._parts(qkv, out, gate_up, down)

    def _parts(
        self, qkv: PreparedLinear, out: PreparedLinear, gate_up: PreparedLinear, down: PreparedLinear
    ) -> LayerParts:
        attention = self.attention
        query_norm, key_norm = attention.query_norm, attention.key_norm
        return LayerParts(
            attention_norm=self.attention_norm.weight,
            qkv=qkv,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            out=out,
            mlp_norm=self.mlp_norm.weight,
            gate_up=gate_up,
            down=down,
            eps=self.mlp_norm.eps,
            num_heads=attention.config.num_heads,
            num_kv_heads=attention.config.num_kv_heads,
            head_dim=attention.config.head_dim,
            scale=attention.scale,
            window=attention.window,
        )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what this block's mlp adds, the sum before it); both [T, hidden]."""
        assert self._norm_qkv is not None, "prepare comes before the first forward"
        assert self._norm_mlp is not None, "prepare comes before the first forward"
        fused, residual = self._norm_qkv(hidden, residual)
        attended = self.attention(fused, context)
        return self._norm_mlp(attended, residual)


class CausalLm(nn.Module):
    """Token ids in, logits out. Made by `allocate`; `weights.load_weights` fills the parameters; `prepare` hands them
    to the kernels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tied_embeddings else _parameter(config.vocab_size, config.hidden_size)
        self.inverse_frequencies = torch.empty(0)  # [head_dim / 2] float32 once allocated
        self._head: PreparedLinear | None = None
        self._whole_layers: PreparedLayers | None = None

    @classmethod
    def allocate(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "CausalLm":
        """A model with uninitialised parameters; memory is not touched before it is written."""
        with torch.device("meta"):
            model = cls(config)
        model = model.to(dtype).to_empty(device=device)
        model.inverse_frequencies = config.inverse_frequencies().to(device)
        return model

    def prepare(self, kernels: Kernels) -> None:
        """Lays out the loaded weights for the backend, one at a time: a packed one replaces the parameter. Only a tied
        embedding may then be held twice, once to look tokens up and once as the output layer."""
        parts = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), type(layer)
            parts.append(layer.prepare(kernels))
        self._whole_layers = kernels.prepare_layers(parts)
        self._head = kernels.prepare_linear(self.embedding if self.lm_head is None else self.lm_head, None, wide=True)
        self.lm_head = None

    def forward(
        self,
        batch: Batch,
        kv_cache: KvCache,
        kernels: Kernels,
        on_layer: OnLayer | None,
        on_scores: OnScores | None = None,
    ) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of the batch's `sample_tokens`; writes the K and V of all tokens. `on_scores`
        gets those of the `score_tokens`, a slice at a time: of a whole chunk they would not fit."""
        angles = batch.positions.float().unsqueeze(1) * self.inverse_frequencies
        context = ForwardContext(batch, kv_cache, kernels, angles.cos(), angles.sin(), on_layer)
        hidden = F.embedding(batch.token_ids, self.embedding)
        residual = torch.zeros_like(hidden)
        run = self._begin_run(hidden, residual, context)
        if run is None:
            for layer in self.layers:
                hidden, residual = layer(hidden, residual, context)
        else:
            self._run_layers(run, context)  # overwrites hidden and residual
        if batch.score_tokens is not None and on_scores is not None:
            for places in torch.split(batch.score_tokens, ROWS_AT_ONCE):
                on_scores(self._logits(hidden[places], residual[places], kernels))
        if not batch.all_sample:
            hidden, residual = hidden[batch.sample_tokens], residual[batch.sample_tokens]
        return self._logits(hidden, residual, kernels)

    def _logits(self, hidden: torch.Tensor, residual: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        assert self._head is not None, "prepare comes before the first forward"
        normed, _ = self.norm.add(hidden, residual, kernels)
        return self._head(normed)

    def _begin_run(self, hidden: torch.Tensor, residual: torch.Tensor, context: ForwardContext) -> LayerRun | None:
        """For a step that the backend computes a layer at a time: all rows have one token, and there are few."""
        batch = context.batch
        if self._whole_layers is None or batch.decode is None or batch.prefill is not None:
            return None
        pool_dtype = context.kv_cache.layer(0)[0].dtype
        step = DecodeStep(context.cos, context.sin, batch.slot_mapping, batch.decode, pool_dtype)
        return self._whole_layers.begin(hidden, residual, step)

    def _run_layers(self, run: LayerRun, context: ForwardContext) -> None:
        for index in range(self.config.num_layers):
            run(index, *context.kv_cache.layer(index))
            if context.on_layer is not None:
                context.on_layer(index)
