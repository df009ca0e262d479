"""Which number formats the settings name: what a forward computes in, and what its K and V are kept in."""

from pathlib import Path
from typing import Final

import torch

from engine.errors import ModelError
from engine.kv_cache import FLOAT8, dtype_named
from engine.weights import checkpoint_dtype

AUTO: Final = "auto"
DTYPES: Final = ("float32", "bfloat16", "float16")
"""What a forward computes in, beside "auto": the checkpoint's own."""
FP8: Final = "fp8"
"""What `--kv-cache-dtype` calls FLOAT8."""


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16; the reverse of `dtype_named`."""
    return str(dtype).removeprefix("torch.")


def select_dtype(name: str, model_path: Path) -> torch.dtype:
    """A dtype by name; "auto" is the checkpoint's. Raises ModelError for one that a forward cannot compute in."""
    chosen = name_of(checkpoint_dtype(model_path)) if name == AUTO else name
    if chosen not in DTYPES:
        raise ModelError(f"cannot compute in dtype {chosen!r}; choose one of: {', '.join(DTYPES)}")
    return dtype_named(chosen)


def select_kv_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """What `--kv-cache-dtype` calls `name`; "auto" is what the forward computes in. Raises ModelError."""
    if name == AUTO:
        return compute_dtype
    if name not in (*DTYPES, FP8):
        raise ModelError(f"cannot keep K and V in dtype {name!r}; choose one of: {', '.join((*DTYPES, FP8))}")
    return dtype_named(FLOAT8 if name == FP8 else name)
