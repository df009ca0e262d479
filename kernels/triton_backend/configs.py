"""Tile sizes of the attention kernels by architecture: the one place where they are chosen, and why.

Nothing is tuned at start-up: what a machine runs is what `make kernels-aot` has compiled and checked. The values are
derived from the limits below and from the compiled code (registers, spills, shared memory); no device has timed them.
Decode is bound by memory: its tiles are as large as 3 stages allow without spills, and a segment of 256 tokens costs
about 3 % of its bytes in partial results while it still gives a single row of 8,192 tokens 32 programs a KV head.

    shared memory of a program    sm_90, sm_100 227 KiB; sm_80 163; sm_86, sm_89, sm_120 (rows of sm_80) 99; gfx942 64
    registers of a thread         255 on NVIDIA, 512 on gfx942
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from kernels.errors import UnsupportedShapeError


@dataclass(frozen=True)
class DecodeConfig:
    """Of `paged_decode`. A segment is a whole number of tiles."""

    tile: int  # tokens at a time
    segment: int  # tokens that one program takes at least, if there are so many
    num_warps: int
    num_stages: int
    programs: int = 1024  # most of one launch; each takes segments until none is left


@dataclass(frozen=True)
class PrefillConfig:
    """Of `paged_prefill`."""

    rows: int  # queries times query heads of a KV head in one tile
    tile: int  # tokens at a time
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionConfigs:
    decode: DecodeConfig
    prefill: PrefillConfig
    why: str


_TABLE: Final[Mapping[tuple[str, int], AttentionConfigs]] = MappingProxyType(
    {
        ("sm_80", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3),
            "4 warps for 128 rows spill",
        ),
        ("sm_80", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=3),
            "64 tokens a tile spill; two programs of 64 rows fit one multiprocessor and hide each other's waits",
        ),
        ("sm_80", 256): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=64, tile=32, num_warps=8, num_stages=3),
            "sums of 64 x 256 take 64 registers of each of 8 warps; 4 warps, or 128 rows, spill",
        ),
        ("sm_90", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3),
            "128 registers: two programs a multiprocessor, one's softmax beside the other's products",
        ),
        ("sm_90", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3),
            "two warpgroups of 64 rows; 128 tokens a tile leave no spare registers for soft cap and window",
        ),
        ("sm_90", 256): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=32, num_warps=8, num_stages=3),
            "sums of 128 x 256 take 128 registers a thread, so the scores must be narrow",
        ),
        ("sm_100", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=128, num_warps=8, num_stages=3),
            "the matrix unit takes 128 rows and keeps sums in its own memory; 64 tokens a tile spill",
        ),
        ("sm_100", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3),
            "128 rows for the matrix unit; 4 warps spill when they rescale the sums",
        ),
        ("sm_100", 256): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=32, num_warps=8, num_stages=2),
            "as sm_90, one stage less beside 64 KiB of queries",
        ),
        ("gfx942", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=128, tile=32, num_warps=4, num_stages=2),
            "4 warps of 32 rows suit the 32 x 32 matrix instruction; 64 tokens a tile spill scalars",
        ),
        ("gfx942", 128): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=128, tile=32, num_warps=4, num_stages=2),
            "half of the shared memory, so that two programs fit; 64 tokens a tile spill",
        ),
        ("gfx942", 256): AttentionConfigs(
            DecodeConfig(tile=16, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=64, tile=16, num_warps=4, num_stages=2),
            "half of the shared memory, so that two programs fit; 32 tokens a tile spill",
        ),
    }
)

_CONVERTING: Final[Mapping[tuple[str, int], AttentionConfigs]] = MappingProxyType(
    {
        ("sm_80", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=8, num_stages=3),
            PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=3),
            "4 warps spill in decode: numbers are held in both formats for a moment",
        ),
        ("sm_80", 256): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=8, num_stages=3),
            PrefillConfig(rows=64, tile=32, num_warps=8, num_stages=3),
            "as for 128",
        ),
        ("sm_90", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=8, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3),
            "as sm_80",
        ),
        ("gfx942", 128): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=128, tile=16, num_warps=4, num_stages=2),
            "32 tokens a tile spill scalars in prefill with window and soft cap",
        ),
    }
)
"""Rows for pools whose dtype is not the queries'; where there is none, that of the table above does."""

_FLOAT32: Final[Mapping[int, AttentionConfigs]] = MappingProxyType(
    {
        size: AttentionConfigs(
            DecodeConfig(tile=16, segment=256, num_warps=4 if size == 256 else 2, num_stages=1 if size == 256 else 2),
            PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=1),
            "exact products use no matrix unit: it is there to compare with, on any chip, within 64 KiB",
        )
        for size in (64, 128, 256)
    }
)

_FLOAT32_CONVERTING: Final[Mapping[int, AttentionConfigs]] = MappingProxyType(
    {
        size: AttentionConfigs(
            DecodeConfig(tile=16, segment=256, num_warps=8 if size < 256 else 4, num_stages=1),
            PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=1),
            "2 stages spill hundreds of bytes in decode",
        )
        for size in (64, 128, 256)
    }
)
"""float32 queries over another format, or half-precision ones over float32, whose tiles of twice the bytes would not
fit the shared memory that the table is made for."""


FLOAT8_CASTS: Final = frozenset({"sm_90", "sm_100"})
"""Chips with an instruction that reads OCP e4m3. gfx942 has another e4m3, with a bias of 8; the rows of sm_80 serve
chips without any."""
ARCHITECTURES: Final = tuple(sorted({architecture for architecture, _ in _TABLE}))
SIZES: Final = tuple(sorted({size for _, size in _TABLE}))
MAX_HEAD_DIM: Final = SIZES[-1]


def attention_configs(
    architecture: str, head_dim: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> AttentionConfigs:
    """The row for an architecture in ARCHITECTURES, queries of a dtype, and a pool of the same dtype or another one.
    Raises UnsupportedShapeError past MAX_HEAD_DIM."""
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedShapeError(f"triton kernels take heads of up to {MAX_HEAD_DIM}, not {head_dim}: use reference")
    size = min(size for size in SIZES if size >= head_dim)
    converting = stored is not None and stored != dtype
    if torch.float32 in (dtype, stored):
        return _FLOAT32_CONVERTING[size] if converting else _FLOAT32[size]
    row = (architecture, size)
    return _CONVERTING.get(row, _TABLE[row]) if converting else _TABLE[row]
