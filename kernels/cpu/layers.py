"""Python's side of `source/layer.cpp`: a decoder layer over a few rows of one token each is one native call.

All that is known before the first step lies in structs that are made once; what the layers share of a step is a struct
made once a step; a call passes four addresses.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch

from kernels.cpu.library import Function, PackedWeights, check_layout
from kernels.cpu.linear import FEW_ROWS, PackedLinear
from kernels.face import DecodeStep, LayerParts, LayerRun, PreparedLinear

_P: Final = ctypes.c_void_p
_N: Final = ctypes.c_int64
_F: Final = ctypes.c_float


class _Layer(ctypes.Structure):
    """`Layer` of `source/layer.cpp`."""

    _fields_ = (
        *((name, PackedWeights) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _P) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "after")),
        *((name, _N) for name in ("heads", "kv_heads", "head_dim", "window")),
        *((name, _F) for name in ("eps", "scale")),
    )


class _Step(ctypes.Structure):
    """`Step` of `source/layer.cpp`."""

    _fields_ = (
        *((name, _P) for name in ("hidden", "residual", "cos", "sin", "slots")),
        *((name, _P) for name in ("tables", "query_start", "context_lens")),
        *((name, _N) for name in ("table_stride", "rows", "block_size")),
        ("threads", ctypes.c_int),
    )


class NativeLayers:
    """Implements `kernels.face.PreparedLayers` for bfloat16 layers of packed linears."""

    def __init__(self, function: Function, layers: Sequence[LayerParts]) -> None:
        self._function = function
        self._layers = tuple(layers)  # the structs point into what they hold
        structs = [_layer_struct(parts) for parts in layers]
        for struct, following in pairwise(structs):
            struct.after = following.qkv.packed
        structs[-1].after = structs[0].qkv.packed  # after the last, another step
        self._structs = structs
        self._references = [ctypes.byref(struct) for struct in structs]
        self._hidden_size = len(layers[0].attention_norm)

    @staticmethod
    def takes(layers: Sequence[LayerParts]) -> bool:
        return bool(layers) and all(
            isinstance(linear, PackedLinear)
            for parts in layers
            for linear in (parts.qkv, parts.out, parts.gate_up, parts.down)
        )

    def begin(self, hidden: torch.Tensor, residual: torch.Tensor, step: DecodeStep) -> LayerRun | None:
        if len(hidden) > FEW_ROWS or step.pool_dtype != torch.bfloat16:
            return None
        assert hidden.shape == residual.shape == (len(step.rows), self._hidden_size), (hidden.shape, residual.shape)
        return NativeRun(self._function, self._references, hidden, residual, step)


class NativeRun:
    """Implements `kernels.face.LayerRun`."""

    def __init__(
        self,
        function: Function,
        layers: Sequence[Any],
        hidden: torch.Tensor,
        residual: torch.Tensor,
        step: DecodeStep,
    ) -> None:
        self._function = function
        self._layers = layers
        self._kept = (hidden, residual, step)  # the struct points into them
        rows = step.rows
        check_layout(torch.bfloat16, hidden, residual)
        check_layout(torch.float32, step.cos, step.sin)
        check_layout(torch.int64, step.slot_mapping)
        check_layout(torch.int32, rows.query_start, rows.context_lens)
        assert rows.block_tables.dtype == torch.int32, rows.block_tables.dtype
        assert rows.block_tables.stride(1) == 1, rows.block_tables.stride()
        addresses = [tensor.data_ptr() for tensor in (hidden, residual, step.cos, step.sin, step.slot_mapping)]
        addresses += [tensor.data_ptr() for tensor in (rows.block_tables, rows.query_start, rows.context_lens)]
        # The size of a block is the pool's: set at the first call.
        self._step = _Step(*addresses, rows.block_tables.stride(0), len(rows), 0, torch.get_num_threads())
        self._reference = ctypes.byref(self._step)

    def __call__(self, index: int, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
        assert k_pool.dtype == torch.bfloat16, k_pool.dtype
        self._step.block_size = k_pool.shape[1]
        self._function(self._layers[index], self._reference, k_pool.data_ptr(), v_pool.data_ptr())


def _layer_struct(parts: LayerParts) -> _Layer:
    linears = [_packed(linear) for linear in (parts.qkv, parts.out, parts.gate_up, parts.down)]
    norms = [_address(norm) for norm in (parts.attention_norm, parts.mlp_norm, parts.query_norm, parts.key_norm)]
    sizes = (parts.num_heads, parts.num_kv_heads, parts.head_dim, parts.window or 0)
    return _Layer(*linears, *norms, None, *sizes, parts.eps, parts.scale)


def _packed(linear: PreparedLinear) -> PackedWeights:
    assert isinstance(linear, PackedLinear), type(linear)
    return linear.weights


def _address(norm: torch.Tensor | None) -> int | None:
    if norm is None:
        return None
    check_layout(torch.bfloat16, norm)
    return norm.data_ptr()
