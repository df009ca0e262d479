"""What the forward pass needs to know of a checkpoint, read from its config.json and checked field by field.

Only architectures and settings that the forward computes exactly are let through; anything else is a ModelError that
names the field, never an approximation.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import AutoConfig

from engine.errors import ModelError


class _Windows(Enum):
    """Which layers have a sliding window."""

    NONE = "none"
    ALL = "all"  # if the config has a sliding_window
    BY_LAYER_TYPE = "by_layer_type"  # those that the config's layer_types call sliding_attention


@dataclass(frozen=True)
class _Family:
    """How an architecture differs from plain Llama. None for a bias: the config's `attention_bias` decides."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias_from_config: bool = False
    qk_norm: bool = False
    windows: _Windows = _Windows.NONE


_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(qkv_bias=None, o_bias=None, mlp_bias_from_config=True),
        "MistralForCausalLM": _Family(qkv_bias=False, o_bias=False, windows=_Windows.ALL),
        "Qwen2ForCausalLM": _Family(qkv_bias=True, o_bias=False, windows=_Windows.BY_LAYER_TYPE),
        "Qwen3ForCausalLM": _Family(qkv_bias=None, o_bias=None, qk_norm=True, windows=_Windows.BY_LAYER_TYPE),
    }
)


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of RoPE for contexts longer than those of pre-training.

    "linear": all frequencies divided by `factor`. "llama3": only the long wavelengths, with a smooth passage between
    `original_length / low_freq_factor` and `original_length / high_freq_factor` tokens (Llama 3.1 model card).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_length: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a forward pass. `windows[i]` is layer i's attention window in tokens, None for all."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    max_position_embeddings: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def digest(self) -> str:
        """Hex digest over the fields that change the forward pass; the length limit is not one of them."""
        fields = dataclasses.asdict(self)
        del fields["max_position_embeddings"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians a token of each rotated pair, [head_dim / 2] float32 on the CPU (RoPE, arXiv:2104.09864)."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        if self.rope_scaling is None:
            return frequencies
        if self.rope_scaling.kind == "linear":
            return frequencies / self.rope_scaling.factor
        return _llama3_frequencies(frequencies, self.rope_scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended linearly."""
    rotations = scaling.original_length * frequencies / (2 * math.pi)
    smooth = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def load_model_config(model_path: Path) -> ModelConfig:
    """Reads config.json of a checkpoint folder. Raises ModelError naming what cannot be served."""
    architecture = _architecture(read_json(model_path / "config.json"))
    try:
        source = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # whatever a validator of transformers raises, the cause is the file
        reason = " ".join(str(error).split())
        raise ModelError(f"{model_path / 'config.json'} is not a valid config: {reason}") from error
    return _ConfigReader(architecture, source).read()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; ModelError if it is missing or anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return str(name)
    raise ModelError(f"unsupported architecture {names}; supported: {', '.join(_FAMILIES)}")


class _ConfigReader:
    """Turns a transformers config into a ModelConfig, refusing what the forward does not compute."""

    def __init__(self, architecture: str, source: Any) -> None:
        self._architecture = architecture
        self._family = _FAMILIES[architecture]
        self._source = source

    def read(self) -> ModelConfig:
        self._refuse_unsupported()
        source, family = self._source, self._family
        attention_bias = bool(getattr(source, "attention_bias", False))
        config = ModelConfig(
            architecture=self._architecture,
            vocab_size=source.vocab_size,
            hidden_size=source.hidden_size,
            intermediate_size=source.intermediate_size,
            num_layers=source.num_hidden_layers,
            num_heads=source.num_attention_heads,
            num_kv_heads=source.num_key_value_heads,
            head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
            rms_norm_eps=source.rms_norm_eps,
            rope_theta=float(self._rope["rope_theta"]),
            rope_scaling=self._rope_scaling(),
            windows=self._windows(),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.mlp_bias_from_config and bool(getattr(source, "mlp_bias", False)),
            qk_norm=family.qk_norm,
            tied_embeddings=bool(source.tie_word_embeddings),
            max_position_embeddings=source.max_position_embeddings,
        )
        _check_shapes(config)
        return config

    def _refuse_unsupported(self) -> None:
        source = self._source
        if source.hidden_act != "silu":
            raise self._unsupported("hidden_act", source.hidden_act, "silu")
        if getattr(source, "quantization_config", None) is not None:
            raise self._unsupported("quantization_config", source.quantization_config, "none")
        if self._family.qkv_bias is False and getattr(source, "attention_bias", False):
            raise self._unsupported("attention_bias", True, "false")
        if not self._family.mlp_bias_from_config and getattr(source, "mlp_bias", False):
            raise self._unsupported("mlp_bias", True, "false")

    @property
    def _rope(self) -> Mapping[str, Any]:
        rope = self._source.rope_parameters
        if not isinstance(rope, Mapping) or "rope_theta" not in rope:
            raise self._unsupported("rope_parameters", rope, "one set for all layers, with rope_theta")
        return rope

    def _rope_scaling(self) -> RopeScaling | None:
        rope = self._rope
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise self._unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        match rope.get("rope_type", "default"):
            case "default":
                return None
            case "linear":
                return RopeScaling("linear", float(rope["factor"]))
            case "llama3":
                return self._llama3_scaling(rope)
            case other:
                raise self._unsupported("rope_type", other, "default, linear, llama3")

    def _llama3_scaling(self, rope: Mapping[str, Any]) -> RopeScaling:
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        if low >= high:
            raise self._unsupported("high_freq_factor", high, f"one above low_freq_factor, {low},")
        original_length = int(rope["original_max_position_embeddings"])
        return RopeScaling("llama3", float(rope["factor"]), low, high, original_length)

    def _windows(self) -> tuple[int | None, ...]:
        """Each layer's window. Families without layer types of their own refuse a config that asks for others."""
        source = self._source
        kinds = getattr(source, "layer_types", None)
        if self._family.windows is _Windows.BY_LAYER_TYPE:
            return tuple(self._window_of(kind) for kind in kinds or ())
        window = source.sliding_window if self._family.windows is _Windows.ALL else None
        expected = "full_attention" if window is None else "sliding_attention"
        if kinds is not None and set(kinds) != {expected}:
            raise self._unsupported("layer_types", kinds, f"{expected} on all layers")
        return (window,) * int(source.num_hidden_layers)

    def _window_of(self, kind: str) -> int | None:
        if kind == "full_attention":
            return None
        if kind == "sliding_attention" and self._source.sliding_window is not None:
            return int(self._source.sliding_window)
        raise self._unsupported("layer_types", kind, "full_attention, or sliding_attention with a sliding_window")

    def _unsupported(self, field: str, value: object, supported: str) -> ModelError:
        return ModelError(f"{self._architecture}: {field}={value!r} in config.json is not supported ({supported} is)")


def _check_shapes(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim} is odd: RoPE rotates pairs")
    if len(config.windows) != config.num_layers:
        raise ModelError(f"layer_types has {len(config.windows)} entries for {config.num_layers} layers")
    if any(window is not None and window < 1 for window in config.windows):
        raise ModelError(f"sliding_window is less than one token in {config.windows}")
