"""Tile sizes of the attention kernels by architecture: the one place where they are chosen, and why.

Nothing is tuned at start-up: what a machine runs is what `make kernels-aot` has compiled and checked. The values are
derived from the limits below and from the compiled code (registers, spills, shared memory); no device has timed them.

    shared memory of a program    sm_80 163 KiB, sm_90 and sm_100 227 KiB, sm_86 and sm_89 99 KiB, gfx942 64 KiB
    registers of a thread         255 on NVIDIA, 512 on gfx942
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch


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


_DECODE_WHY: Final = "a segment of 256 tokens costs 3 % of its bytes in partial results"
_TABLE: Final[Mapping[tuple[str, int], AttentionConfigs]] = MappingProxyType(
    {
        ("sm_80", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=4, num_stages=3),
            "4 warps of 32 rows each: the keys in registers serve two row groups",
        ),
        ("sm_80", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=2),
            "8 warps halve the 128 x 128 sums to 64 registers a thread",
        ),
        ("sm_80", 256): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=2),
            "sums of 64 x 256 fill half of the registers; wider tiles spill",
        ),
        ("sm_90", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=128, num_warps=8, num_stages=2),
            "warpgroups of 64 rows; 128 tokens make each matrix instruction as wide as it gets at this size",
        ),
        ("sm_90", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3),
            "two warpgroups; 3 stages of K and V, 32 KiB each, beside 32 KiB of queries",
        ),
        ("sm_90", 256): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=32, num_warps=8, num_stages=2),
            "sums of 128 x 256 take 128 registers a thread, so the scores must be narrow",
        ),
        ("sm_100", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=128, num_warps=4, num_stages=2),
            "the matrix unit takes 128 rows and keeps results in its own memory: one warp each 32 rows",
        ),
        ("sm_100", 128): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=64, num_warps=4, num_stages=3),
            "as for 64, with half the tokens a tile",
        ),
        ("sm_100", 256): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=3),
            PrefillConfig(rows=128, tile=32, num_warps=8, num_stages=2),
            "as sm_90",
        ),
        ("gfx942", 64): AttentionConfigs(
            DecodeConfig(tile=64, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=128, tile=64, num_warps=4, num_stages=2),
            "64 KiB of shared memory",
        ),
        ("gfx942", 128): AttentionConfigs(
            DecodeConfig(tile=32, segment=256, num_warps=4, num_stages=2),
            PrefillConfig(rows=128, tile=32, num_warps=4, num_stages=2),
            "64 KiB of shared memory",
        ),
        ("gfx942", 256): AttentionConfigs(
            DecodeConfig(tile=16, segment=256, num_warps=4, num_stages=1),
            PrefillConfig(rows=64, tile=16, num_warps=4, num_stages=1),
            "64 KiB of shared memory",
        ),
    }
)

_FLOAT32: Final = AttentionConfigs(
    DecodeConfig(tile=16, segment=256, num_warps=4, num_stages=1),
    PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=1),
    "exact products use no matrix unit; it is there to compare with, on any architecture",
)

ARCHITECTURES: Final = tuple(sorted({architecture for architecture, _ in _TABLE}))
SIZES: Final = tuple(sorted({size for _, size in _TABLE}))
MAX_HEAD_DIM: Final = SIZES[-1]


def attention_configs(architecture: str, head_dim: int, dtype: torch.dtype) -> AttentionConfigs:
    """The row for an architecture in ARCHITECTURES, a head size up to MAX_HEAD_DIM, and a dtype."""
    if dtype == torch.float32:
        return _FLOAT32
    return _TABLE[architecture, min(size for size in SIZES if size >= head_dim)]


def architecture_of(device: torch.device) -> str:
    """The row of the table that serves a device: its own, or the largest older one, whose limits it keeps.

    On the CPU, where only Triton's interpreter runs, any row will do.
    """
    if device.type == "cpu":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return "sm_100" if major == 10 else "sm_90" if major == 9 else "sm_80"
