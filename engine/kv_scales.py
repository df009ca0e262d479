"""What a checkpoint says of the scales of a float8 KV cache: for K and V of each layer, one or one for each KV head.

    model.layers.N.self_attn.k_scale, v_scale     a scalar, [1] or [num_kv_heads]; float32 here

A checkpoint without them means 1.0 everywhere. One that has some must have all: a forgotten scale would go unnoticed.
"""

import re
from dataclasses import dataclass, field
from typing import Final

import torch

from engine.errors import ModelError
from engine.model_config import ModelConfig
from kernels.face import KvScales

_NAME: Final = re.compile(r"model\.layers\.(\d+)\.self_attn\.([kv])_scale")


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is one of these."""
    return _NAME.fullmatch(name) is not None


def unit_scales(num_layers: int, num_kv_heads: int, device: torch.device) -> tuple[KvScales, ...]:
    """1.0 everywhere; all layers share the tensors."""
    ones = torch.ones(num_kv_heads, device=device)
    return (KvScales(ones, ones),) * num_layers


@dataclass(frozen=True)
class ScaleReader:
    """Takes the scales of a checkpoint one by one."""

    config: ModelConfig
    found: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)  # by (layer, "k" or "v")

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ModelError for a layer that there is not, another shape, or numbers that are no scales."""
        match = _NAME.fullmatch(name)
        assert match is not None, name
        layer, num_heads = int(match[1]), self.config.num_kv_heads
        if layer >= self.config.num_layers:
            raise ModelError(f"surplus weight {name}: the model has {self.config.num_layers} layers")
        if tuple(tensor.shape) not in ((), (1,), (num_heads,)) or not tensor.is_floating_point():
            raise ModelError(
                f"weight {name} is {tensor.dtype} of shape {list(tensor.shape)}: a KV scale is one floating-point "
                f"number, or one for each of the {num_heads} KV heads"
            )
        scale = tensor.float().reshape(-1).expand(num_heads).clone()
        if not (scale.isfinite() & (scale > 0)).all():
            raise ModelError(f"weight {name} is {scale.tolist()}: KV scales are finite and above 0")
        self.found[layer, match[2]] = scale

    def scales(self, device: torch.device) -> tuple[KvScales, ...]:
        """Of each layer, on `device`. Raises ModelError if only some have been taken."""
        num_layers = self.config.num_layers
        if not self.found:
            return unit_scales(num_layers, self.config.num_kv_heads, device)
        wanted = {(layer, which) for layer in range(num_layers) for which in "kv"}
        if missing := wanted - self.found.keys():
            layer, which = min(missing)
            raise ModelError(
                f"the checkpoint has KV scales, but none named model.layers.{layer}.self_attn.{which}_scale"
            )
        parts = {key: scale.to(device) for key, scale in self.found.items()}
        return tuple(KvScales(parts[layer, "k"], parts[layer, "v"]) for layer in range(num_layers))
