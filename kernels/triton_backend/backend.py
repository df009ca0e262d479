"""The Triton kernels as a backend. Each method makes the outputs, checks what a kernel relies on, and launches."""

from collections.abc import Sequence

import torch

from kernels.composed import ComposedMlp, ComposedNormLinear
from kernels.face import KvScales, LayerParts, PreparedBlock, PreparedLinear, RaggedRows
from kernels.reference import TorchLinear, check_scales
from kernels.sampling import SamplingKernels, TorchSampling
from kernels.triton_backend.configs import AttentionConfigs, attention_configs
from kernels.triton_backend.decode import decode_launches
from kernels.triton_backend.elementwise import norm_launch, silu_mul_launch
from kernels.triton_backend.formats import readable
from kernels.triton_backend.move_kv import move_kv_launch
from kernels.triton_backend.prefill import prefill_launch
from kernels.triton_backend.rope_store import rope_store_launch


class TritonKernels:
    """Implements `kernels.face.Kernels`; the contracts are documented there. bfloat16, float16, float32.

    `architecture` names rows of `configs`; `attention` overrides them, for tests.
    """

    name = "triton"
    capturable = True
    sampling: SamplingKernels = TorchSampling()

    def __init__(self, architecture: str, attention: AttentionConfigs | None = None) -> None:
        self._architecture = architecture
        self._attention = attention

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> PreparedLinear:
        """torch's own product: cuBLAS is at the limit already."""
        return TorchLinear(weight, bias, wide)

    def norm_linear(self, norm: torch.Tensor, eps: float, linear: PreparedLinear) -> PreparedBlock:
        return ComposedNormLinear(self, norm, eps, linear)

    def norm_mlp(self, norm: torch.Tensor, eps: float, gate_up: PreparedLinear, down: PreparedLinear) -> PreparedBlock:
        return ComposedMlp(self, norm, eps, gate_up, down)

    def prepare_layers(self, layers: Sequence[LayerParts]) -> None:
        """A layer is its single kernels here."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x if x.stride(-1) == 1 and x.dim() <= 3 else x.contiguous().flatten(0, -2)
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm_launch(output, None, x, None, weight, eps).run()
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.contiguous()
        output, total = torch.empty_like(residual), torch.empty_like(residual)
        norm_launch(output, total, x if x.stride(-1) == 1 else x.contiguous(), residual, weight, eps).run()
        return output, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        output = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        silu_mul_launch(output, gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()).run()
        return output

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
        _check_pools(k_pool, v_pool)
        check_scales(k_pool, v_pool, scales)
        query, key, value = (_heads_side_by_side(x) for x in (query, key, value))
        output = query.new_empty(query.shape)
        cos, sin = cos.contiguous(), sin.contiguous()
        rope_store_launch(output, query, key, value, cos, sin, k_pool, v_pool, slot_mapping, scales).run()
        return output

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
        _check_pools(k_pool, v_pool)
        check_scales(k_pool, v_pool, scales)
        query = _heads_side_by_side(query)
        output = query.new_empty(query.shape)
        config = self._configs(query, k_pool).decode
        pools = self._readable(k_pool), self._readable(v_pool)
        for launch in decode_launches(output, query, *pools, rows, scale, window, softcap, scales, config):
            launch.run()
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
        _check_pools(k_pool, v_pool)
        check_scales(k_pool, v_pool, scales)
        query = _heads_side_by_side(query)
        output = query.new_empty(query.shape)
        config = self._configs(query, k_pool).prefill
        pools = self._readable(k_pool), self._readable(v_pool)
        prefill_launch(output, query, *pools, rows, scale, window, softcap, scales, config).run()
        return output

    def gather_kv(
        self, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check_pools(k_pool, v_pool)
        shape = (len(slots), *k_pool.shape[2:])
        key, value = k_pool.new_empty(shape), v_pool.new_empty(shape)
        move_kv_launch(k_pool, v_pool, slots, key, value, 0, into_pool=False).run()
        return key, value

    def splice_kv(
        self,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_start: int,
    ) -> None:
        _check_pools(k_pool, v_pool)
        key, value = _heads_side_by_side(key), _heads_side_by_side(value)
        move_kv_launch(k_pool, v_pool, slots, key, value, head_start, into_pool=True).run()

    def _readable(self, pool: torch.Tensor) -> torch.Tensor:
        return readable(pool, self._architecture)

    def _configs(self, query: torch.Tensor, pool: torch.Tensor) -> AttentionConfigs:
        return self._attention or attention_configs(self._architecture, query.shape[-1], query.dtype, pool.dtype)


def _check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """Kernels find a slot in both pools with the strides of one, and move a slot's heads as one run of elements."""
    _, block_size, _, head_dim = k_pool.shape
    stride_block, stride_token, stride_head, stride_dim = k_pool.stride()
    assert v_pool.stride() == k_pool.stride(), (k_pool.stride(), v_pool.stride())
    assert v_pool.dtype == k_pool.dtype, (k_pool.dtype, v_pool.dtype)
    assert (stride_block, stride_head, stride_dim) == (block_size * stride_token, head_dim, 1), k_pool.stride()


def _heads_side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] itself if each token's heads are contiguous, as in a slice of a fused projection; else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
