"""Plain torch: slow, exact, on any device. The twin that every fast backend is compared with.

Attention runs one row at a time on the gathered tokens of that row alone, so a row's result does not depend on the
rows beside it, and no slot outside its context is ever an operand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.composed import ComposedMlp, ComposedNormLinear
from kernels.face import KvScales, LayerParts, PreparedBlock, PreparedLinear, RaggedRows
from kernels.sampling import SamplingKernels, TorchSampling


@dataclass(frozen=True)
class _Row:
    """One row's share of a batch: queries [query_begin, query_end), tokens [first, context) of its context. Keys and
    values are numbers that attention can take: as stored, or in float32."""

    query_begin: int
    query_end: int
    first: int
    context: int
    keys: torch.Tensor  # [context - first, G, D]
    values: torch.Tensor


@dataclass(frozen=True)
class TorchLinear:
    """torch's own product, over the weight as it is. Implements `kernels.face.PreparedLinear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    wide: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, self.weight, self.bias)
        return product.float() if self.wide else product


class ReferenceKernels:
    """Implements `kernels.face.Kernels`; the contracts are documented there."""

    name = "reference"
    capturable = False
    sampling: SamplingKernels = TorchSampling()

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> PreparedLinear:
        return TorchLinear(weight, bias, wide)

    def norm_linear(self, norm: torch.Tensor, eps: float, linear: PreparedLinear) -> PreparedBlock:
        return ComposedNormLinear(self, norm, eps, linear)

    def norm_mlp(self, norm: torch.Tensor, eps: float, gate_up: PreparedLinear, down: PreparedLinear) -> PreparedBlock:
        return ComposedMlp(self, norm, eps, gate_up, down)

    def prepare_layers(self, layers: Sequence[LayerParts]) -> None:
        """A layer is its single kernels here."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: KvScales | None = None,
    ) -> torch.Tensor:
        check_scales(k_pool, v_pool, scales)
        k_scale, v_scale = _parts(scales)
        key = _stored(_rotate(key, cos, sin), k_pool.dtype, k_scale)
        value = _stored(value, v_pool.dtype, v_scale)
        self.splice_kv(k_pool, v_pool, slot_mapping, key, value, head_start=0)
        return _rotate(query, cos, sin)

    def paged_decode(
        self,
        query: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        rows: RaggedRows,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        scales: KvScales | None = None,
    ) -> torch.Tensor:
        check_scales(k_pool, v_pool, scales)
        output = torch.empty_like(query)
        num_heads, head_dim = query.shape[1:]
        for index, row in enumerate(_each_row(k_pool, v_pool, rows, window, query.dtype, scales)):
            # The query heads that share a KV head become the queries of one small attention: nothing is repeated.
            grouped = query[index].reshape(1, k_pool.shape[2], -1, head_dim)
            keys, values = _heads_first(row.keys), _heads_first(row.values)
            attended = _attention(grouped.to(keys.dtype), keys, values, None, scale, softcap)
            output[index] = attended.reshape(num_heads, head_dim)
        return output

    def paged_prefill(
        self,
        query: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        rows: RaggedRows,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        scales: KvScales | None = None,
    ) -> torch.Tensor:
        check_scales(k_pool, v_pool, scales)
        output = torch.empty_like(query)
        for row in _each_row(k_pool, v_pool, rows, window, query.dtype, scales):
            attended = _attention(
                _heads_first(query[row.query_begin : row.query_end]).to(row.keys.dtype),
                _heads_first(row.keys),
                _heads_first(row.values),
                _causal_mask(row, window, query.device),
                scale,
                softcap,
            )
            output[row.query_begin : row.query_end] = attended[0].transpose(0, 1)
        return output

    def gather_kv(
        self, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _select(k_pool.flatten(0, 1), slots), _select(v_pool.flatten(0, 1), slots)

    def splice_kv(
        self,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_start: int,
    ) -> None:
        heads = slice(head_start, head_start + key.shape[1])
        for pool, tokens in ((k_pool, key), (v_pool, value)):
            _movable(pool).view(-1, *pool.shape[2:])[:, heads].index_copy_(0, slots, _movable(tokens))


def check_scales(k_pool: torch.Tensor, v_pool: torch.Tensor, scales: KvScales | None) -> None:
    """Scales come with float8 pools, one a KV head, and with no others."""
    assert k_pool.dtype == v_pool.dtype, (k_pool.dtype, v_pool.dtype)
    assert (scales is not None) == (k_pool.dtype == torch.float8_e4m3fn), k_pool.dtype
    if scales is not None:
        for scale in (scales.key, scales.value):
            assert (scale.dtype, scale.shape) == (torch.float32, k_pool.shape[2:3]), (scale.dtype, scale.shape)


def _parts(scales: KvScales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scales is None else (scales.key, scales.value)


def _stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """x [T, G, D] in a pool's format. Its limits are kept here: torch's casts saturate on some devices, not on all."""
    if x.dtype == dtype:
        return x
    wide = x.float() if scale is None else x.float() / scale.unsqueeze(1)
    limit = torch.finfo(dtype).max
    return wide.clamp(-limit, limit).to(dtype)


def _numbers(stored: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """What stored tokens [n, G, D] stand for: themselves if they are of the queries' `dtype`, else float32."""
    if stored.dtype == dtype:
        return stored
    return stored.float() if scale is None else stored.float() * scale.unsqueeze(1)


def _movable(x: torch.Tensor) -> torch.Tensor:
    """The same memory as torch can move it: few of its operators know float8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _select(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """x[indices] for any dtype."""
    return _movable(x).index_select(0, indices).view(x.dtype)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of [1, heads, queries, D] over [1, KV heads, tokens, D]; torch's own has no soft cap."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1).float(), values.repeat_interleave(group, 1).float()
    scores = softcap * torch.tanh(query.float() @ keys.transpose(-1, -2) * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values).to(query.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [T, heads, D] in float32, in x's dtype: element i of a head is paired with element i + D / 2."""
    front, back = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((front * cos - back * sin, back * cos + front * sin), dim=-1).to(x.dtype)


def _each_row(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: RaggedRows,
    window: int | None,
    dtype: torch.dtype,
    scales: KvScales | None,
) -> Iterator[_Row]:
    """Gathers, row by row, the tokens that any of the row's queries can see; `dtype`: that of the queries."""
    begin = 0
    k_scale, v_scale = _parts(scales)
    for index, (query_len, context) in enumerate(zip(rows.host_query_lens, rows.host_context_lens, strict=True)):
        first = 0 if window is None else max(0, context - query_len - window + 1)
        table = rows.block_tables[index]
        keys = _numbers(_gather(k_pool, table, first, context), dtype, k_scale)
        values = _numbers(_gather(v_pool, table, first, context), dtype, v_scale)
        yield _Row(begin, begin + query_len, first, context, keys, values)
        begin += query_len


def _gather(pool: torch.Tensor, block_table: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Tokens [first, stop) of the row that `block_table` belongs to, [stop - first, G, D]."""
    block_size = pool.shape[1]
    first_block, end_block = first // block_size, -(-stop // block_size)
    tokens = _select(pool, block_table[first_block:end_block]).flatten(0, 1)
    return tokens[first - first_block * block_size :][: stop - first]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, D] as [1, heads, tokens, D]."""
    return x.transpose(0, 1).unsqueeze(0)


def _causal_mask(row: _Row, window: int | None, device: torch.device) -> torch.Tensor:
    """Which gathered token (column) each query (row of the mask) may see, [queries, tokens] bool.

    Queries are the last tokens of the context, so their positions end where the tokens' do. No row of the mask is
    empty: a query sees itself.
    """
    num_queries = row.query_end - row.query_begin
    tokens = torch.arange(row.first, row.context, device=device)
    queries = torch.arange(row.context - num_queries, row.context, device=device).unsqueeze(1)
    visible = tokens <= queries
    return visible if window is None else visible & (tokens > queries - window)
