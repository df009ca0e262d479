"""What `aot` compiles: every kernel, in the shapes of real models, through the same functions that launch it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.face import KvScales, RaggedRows
from kernels.triton_backend.configs import attention_configs
from kernels.triton_backend.decode import decode_launches
from kernels.triton_backend.elementwise import norm_launch, silu_mul_launch
from kernels.triton_backend.formats import readable
from kernels.triton_backend.launch import Launch
from kernels.triton_backend.move_kv import move_kv_launch
from kernels.triton_backend.prefill import prefill_launch
from kernels.triton_backend.rope_store import rope_store_launch


@dataclass(frozen=True)
class Case:
    """`kernel` and `variant` name it in the table."""

    kernel: str
    variant: str
    launch: Launch


@dataclass(frozen=True)
class _Attention:
    """One model's attention. `stored`: the pool's dtype, if it is not `dtype`."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    stored: torch.dtype | None = None

    def __str__(self) -> str:
        options = f" window {self.window} cap {self.softcap}" if self.window else ""
        stored = f", KV {_short(self.stored)}" if self.stored else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"
        return f"{_short(self.dtype)} {heads}, block {self.block_size}{stored}{options}"


_ATTENTIONS = (
    _Attention(64, 9, 3),
    _Attention(80, 32, 32),
    _Attention(96, 32, 32, block_size=128),
    _Attention(128, 32, 8),
    _Attention(256, 16, 8),
    _Attention(128, 28, 4, dtype=torch.float16, block_size=32),
    _Attention(128, 32, 8, window=4096, softcap=50.0),
    _Attention(256, 16, 8, window=4096, softcap=50.0),
    _Attention(128, 32, 8, dtype=torch.float32),
    _Attention(256, 16, 8, dtype=torch.float32, window=4096, softcap=50.0),
    _Attention(64, 9, 3, stored=torch.float8_e4m3fn),
    _Attention(96, 32, 32, block_size=128, stored=torch.float8_e4m3fn),
    _Attention(128, 32, 8, stored=torch.float8_e4m3fn),
    _Attention(128, 28, 4, dtype=torch.float16, block_size=32, stored=torch.float8_e4m3fn),
    _Attention(128, 32, 8, window=4096, softcap=50.0, stored=torch.float8_e4m3fn),
    _Attention(256, 16, 8, stored=torch.float8_e4m3fn),
    _Attention(256, 16, 8, window=4096, softcap=50.0, stored=torch.float8_e4m3fn),
    _Attention(128, 32, 8, dtype=torch.float32, stored=torch.float8_e4m3fn),
    _Attention(128, 32, 8, stored=torch.float32),
    _Attention(128, 32, 8, stored=torch.float16),
)
_CONTEXT, _CHUNK, _NUM_ROWS = 4096, 512, 8


def cases(architecture: str) -> Iterator[Case]:
    """All of an architecture's kernels with the configs that it would run."""
    for attention in _ATTENTIONS:
        yield from _attention_cases(attention, architecture)
    yield from _memory_cases()
    yield from _elementwise_cases()


def _attention_cases(shape: _Attention, architecture: str) -> Iterator[Case]:
    stored = shape.stored or shape.dtype
    config = attention_configs(architecture, shape.head_dim, shape.dtype, stored)
    pool = _empty(1024, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=stored)
    pool = readable(pool, architecture)
    query = _empty(_NUM_ROWS, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    rows = _rows(1, shape.block_size)
    scales = _scales(shape.num_kv_heads) if stored == torch.float8_e4m3fn else None
    options = (1.0, shape.window, shape.softcap, scales)
    attend, combine = decode_launches(query, query, pool, pool, rows, *options, config.decode)
    yield Case("paged_decode", str(shape), attend)
    yield Case("combine", str(shape), combine)
    query = _empty(_NUM_ROWS * _CHUNK, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    rows = _rows(_CHUNK, shape.block_size)
    yield Case("paged_prefill", str(shape), prefill_launch(query, query, pool, pool, rows, *options, config.prefill))


def _memory_cases() -> Iterator[Case]:
    pool, slots = _empty(1024, 16, 8, 128), _empty(512, dtype=torch.int64)
    qkv, angles = _empty(512, 48, 128), _empty(512, 64, dtype=torch.float32)
    query, key, value = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:]
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        target, scales = pool.to(stored), _scales(8) if stored == torch.float8_e4m3fn else None
        arguments = (_empty(512, 32, 128), query, key, value, angles, angles, target, target, slots, scales)
        yield Case("rope_store", f"bf16 32/8 x 128, KV {_short(stored)}", rope_store_launch(*arguments))
    for name, into_pool in (("gather_kv", False), ("splice_kv", True)):
        buffer = _empty(512, 8, 128)
        launch = move_kv_launch(pool, pool, slots, buffer, buffer, 0, into_pool=into_pool)
        yield Case(name, "bf16 8 x 128", launch)


def _elementwise_cases() -> Iterator[Case]:
    x, weight, heads = _empty(512, 4096), _empty(4096), _empty(512, 48, 128)[:, :32]
    yield Case("rms_norm", "bf16 4096", norm_launch(x, None, x, None, weight, 1e-5))
    yield Case("head_norm", "bf16 32 x 128", norm_launch(heads, None, heads, None, _empty(128), 1e-5))
    yield Case("add_rms_norm", "bf16 4096", norm_launch(x, x, x, x, weight, 1e-5))
    yield Case("silu_mul", "bf16 14336", silu_mul_launch(_empty(512, 14336), _empty(512, 2 * 14336)))


def _rows(query_len: int, block_size: int) -> RaggedRows:
    return RaggedRows(
        query_start=_empty(_NUM_ROWS + 1, dtype=torch.int32),
        context_lens=_empty(_NUM_ROWS, dtype=torch.int32),
        block_tables=_empty(_NUM_ROWS, _CONTEXT // block_size, dtype=torch.int32),
        host_query_lens=(query_len,) * _NUM_ROWS,
        host_context_lens=(_CONTEXT,) * _NUM_ROWS,
    )


def _scales(num_kv_heads: int) -> KvScales:
    scale = _empty(num_kv_heads, dtype=torch.float32)
    return KvScales(scale, scale)


def _short(dtype: torch.dtype) -> str:
    """bf16, fp16, fp32, fp8."""
    name = str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
    return name.replace("bfloat", "bf").replace("float", "fp")


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
