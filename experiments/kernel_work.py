"""What a kernel has to do at least: bytes that must pass memory once, and products. Pure arithmetic.

floor = max(bytes / copy bandwidth, FLOPs / matmul peak)
"""

from dataclasses import dataclass
from typing import Final

ACTIVATION_BYTES: Final = 2
"""Of a bfloat16 number, which is what everything but the KV pool is kept in."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its kernels see."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


LLAMA_8B: Final = ModelShape("llama-8b", 4096, 14336, 32, 8, 128)
SMOLLM2: Final = ModelShape("smollm2-135m", 576, 1536, 9, 3, 64)


@dataclass(frozen=True)
class Speeds:
    """Of a device, measured: bytes a second that a copy reads and writes, FLOPs a second of a bfloat16 product."""

    bandwidth: float
    peak: float


@dataclass(frozen=True)
class Work:
    """Bytes read and written once, floating-point operations on the matrix units."""

    bytes: int
    flops: int = 0

    def floor(self, speeds: Speeds) -> float:
        """Seconds that no kernel can go below on a device of these speeds."""
        return max(self.bytes / speeds.bandwidth, self.flops / speeds.peak)

    def bound(self, speeds: Speeds) -> str:
        """What the floor is made of."""
        return "memory" if self.bytes / speeds.bandwidth >= self.flops / speeds.peak else "products"


def attention_work(model: ModelShape, rows: tuple[tuple[int, int], ...], kv_bytes: int) -> Work:
    """Causal attention of rows of (queries, tokens of the context), the queries being the last tokens. Each row's K
    and V are read once, however many heads and queries share them."""
    tokens, queries = sum(context for _, context in rows), sum(count for count, _ in rows)
    pairs = sum(seen_pairs(count, context) for count, context in rows)
    moved = 2 * tokens * model.kv_size * kv_bytes + 2 * queries * model.query_size * ACTIVATION_BYTES
    return Work(
        moved, 4 * pairs * model.query_size
    )  # scores and weighted values, a multiplication and an addition each


def seen_pairs(queries: int, context: int) -> int:
    """(query, token) pairs in which the query sees the token."""
    before = context - queries
    return queries * before + queries * (queries + 1) // 2


def rope_store_work(model: ModelShape, tokens: int, kv_bytes: int) -> Work:
    """Query, key, value and float32 cosines and sines in; query, and K and V in the pool's format, out."""
    read = (model.query_size + 2 * model.kv_size) * ACTIVATION_BYTES + model.head_dim * 4
    written = model.query_size * ACTIVATION_BYTES + 2 * model.kv_size * kv_bytes
    return Work(tokens * (read + written))


def add_rms_norm_work(model: ModelShape, tokens: int) -> Work:
    """x and the residual in, the norm and the sum out."""
    return Work(4 * tokens * model.hidden * ACTIVATION_BYTES)


def silu_mul_work(model: ModelShape, tokens: int) -> Work:
    """Gate and up in, their product out."""
    return Work(3 * tokens * model.intermediate * ACTIVATION_BYTES)


def move_work(model: ModelShape, tokens: int, kv_bytes: int) -> Work:
    """K and V in and out, between the pool and a buffer."""
    return Work(4 * tokens * model.kv_size * kv_bytes)
