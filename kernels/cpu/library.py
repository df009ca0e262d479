"""The compiled library's functions with their argument types. Python's side of `source/*.cpp`.

Loaded after torch, whose OpenMP runtime is then in the process already: both share one pool of threads.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kernels.errors import UnavailableBackendError

_P: Final = ctypes.c_void_p
_N: Final = ctypes.c_int64
_F: Final = ctypes.c_float
_I: Final = ctypes.c_int

Function = Callable[..., None]


@dataclass(frozen=True)
class TypedFunctions:
    """The functions that exist once a number format. Pointers are addresses; strides count elements."""

    # x, residual or None, weight, total or None, out, outer, inner, outer and inner stride, size, eps, threads
    rms_norm: Function
    # gate_up, out, tokens, size, threads
    silu_mul: Function
    # query, key, value, cos, sin, rotated, both pools, slots, tokens, heads, kv_heads, head_dim,
    # strides of query, key and value, threads
    rope_store: Function
    # query, both pools, out, tables, table stride, query starts, context lengths, rows, heads, kv_heads, head_dim,
    # block size, scale, window or 0, threads
    attention: Function


class PackedWeights(ctypes.Structure):
    """`Weights` of `source/linear.h`: addresses of the packed weight and of the bias (or None), then n and k."""

    _fields_ = (("packed", _P), ("bias", _P), ("n", _N), ("k", _N))


@dataclass(frozen=True)
class LinearFunctions:
    """Linears of packed bfloat16 weights."""

    # weight, n, k, packed, threads
    pack: Function
    # weights, x, rows, stride, out, whether out is float, threads
    linear: Function
    # weights, norm, eps, x, residual, total, out, rows, threads
    norm_linear: Function
    # gate_up, down, norm, eps, x, residual, total, out, rows, threads
    norm_mlp: Function
    # layer and step (kernels/cpu/layers.py), both pools
    decode_layer: Function


@dataclass(frozen=True)
class Library:
    """All functions. `linears` is None if the CPU does not multiply bfloat16."""

    bf16: TypedFunctions
    f32: TypedFunctions
    gather: Function  # pool, slots, out, count, bytes of a token
    splice: Function  # pool, slots, source, count, bytes of a token, first byte, bytes of a source token
    linears: LinearFunctions | None
    greatest: Function  # logits, rows, vocabulary size, values, ids, threads
    # logits, rows, vocabulary size, peaks, temperatures, weights, doubts, room for them, threads
    token_weights: Function
    race: Function  # weights, rows, vocabulary size, keys, otherwise, ids, threads


def open_library(path: Path) -> Library:
    """Raises UnavailableBackendError if the file is not a library for this machine."""
    try:
        shared = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableBackendError(f"cannot load the compiled kernels: {error}") from error
    return Library(
        bf16=_typed(shared, "bf16"),
        f32=_typed(shared, "f32"),
        gather=_function(shared, "gather", _P, _P, _P, _N, _N),
        splice=_function(shared, "splice", _P, _P, _P, _N, _N, _N, _N),
        linears=_linears(shared) if shared.kvsplice_has_linear() else None,
        greatest=_function(shared, "greatest", _P, _N, _N, _P, _P, _I),
        token_weights=_function(shared, "token_weights", _P, _N, _N, *[_P] * 4, _N, _I),
        race=_function(shared, "race", _P, _N, _N, *[_P] * 3, _I),
    )


def _linears(shared: Any) -> LinearFunctions:
    weights = ctypes.POINTER(PackedWeights)
    return LinearFunctions(
        pack=_function(shared, "pack", _P, _N, _N, _P, _I),
        linear=_function(shared, "linear", weights, _P, _N, _N, _P, _I, _I),
        norm_linear=_function(shared, "norm_linear", weights, _P, _F, *[_P] * 4, _N, _I),
        norm_mlp=_function(shared, "norm_mlp", weights, weights, _P, _F, *[_P] * 4, _N, _I),
        decode_layer=_function(shared, "decode_layer", *[_P] * 4),
    )


def _typed(shared: Any, suffix: str) -> TypedFunctions:
    return TypedFunctions(
        rms_norm=_function(shared, f"rms_norm_{suffix}", *[_P] * 5, *[_N] * 5, _F, _I),
        silu_mul=_function(shared, f"silu_mul_{suffix}", _P, _P, _N, _N, _I),
        rope_store=_function(shared, f"rope_store_{suffix}", *[_P] * 9, *[_N] * 7, _I),
        attention=_function(shared, f"attention_{suffix}", *[_P] * 5, _N, _P, _P, *[_N] * 5, _F, _N, _I),
    )


def _function(shared: Any, name: str, *argtypes: Any) -> Function:
    function = getattr(shared, f"kvsplice_{name}")
    function.argtypes = argtypes
    function.restype = None
    return function  # type: ignore[no-any-return]


def check_layout(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """The library takes addresses: a wrong format or a gap would be read as numbers."""
    for tensor in tensors:
        assert tensor.dtype == dtype, f"{tensor.dtype} where {dtype} is due"
        assert tensor.is_contiguous(), tensor.stride()
