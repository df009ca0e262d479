"""Checkpoint weights: safetensors files, streamed tensor by tensor straight into the fused parameters.

    file   q_proj [q_size, hidden]  k_proj [kv_size, hidden]  v_proj [kv_size, hidden]
               |                        |                         |
    model  qkv [0 ...... q_size ...... q_size + kv_size ...... q_size + 2 * kv_size]

A tensor is mapped into memory, copied to its rows (converted on the way) and let go: there is never a second copy of
the model. On the way it is sampled for the weights digest.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.kv_scales import ScaleReader, is_kv_scale
from engine.model import CausalLm
from engine.model_config import ModelConfig, read_json
from kernels.face import KvScales

_SINGLE_FILE: Final = "model.safetensors"
_SHARD_INDEX: Final = "model.safetensors.index.json"
_EMBEDDING: Final = "model.embed_tokens.weight"
_LM_HEAD: Final = "lm_head.weight"
_PAGE_BYTES: Final = 4096
_SAMPLED_PAGES: Final = 16


@dataclass(frozen=True)
class Placement:
    """Where a checkpoint tensor goes: rows [row_start, row_start + shape[0]) of a parameter of the model."""

    parameter: str
    row_start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds beside parameters. The digest covers the scales: who agrees on it reads KV alike."""

    digest: str
    kv_scales: tuple[KvScales, ...]  # of each layer, on the model's device


def load_weights(model: CausalLm, model_path: Path) -> Loaded:
    """Fills all parameters of `model` from a checkpoint folder.

    Raises ModelError naming the file or tensor: unreadable, missing, surplus, or of the wrong shape.
    """
    placements = plan_placements(model.config)
    parameters = dict(model.named_parameters())
    scales = ScaleReader(model.config)
    digests: dict[str, str] = {}
    for name, tensor in _stream(model_path):
        digests[name] = _tensor_digest(tensor)
        if is_kv_scale(name):
            scales.take(name, tensor)
            continue
        if name == _LM_HEAD and model.config.tied_embeddings:
            continue  # a second copy of the embedding; checked below
        placement = _placement_of(name, tensor, placements)
        rows = slice(placement.row_start, placement.row_start + placement.shape[0])
        parameters[placement.parameter].data[rows].copy_(tensor)
    missing = placements.keys() - digests.keys()
    if missing:
        raise ModelError(f"{model_path} lacks {len(missing)} weights, among them {min(missing)}")
    if model.config.tied_embeddings and digests.get(_LM_HEAD, digests[_EMBEDDING]) != digests[_EMBEDDING]:
        raise ModelError(f"config.json ties the embeddings, but {_LM_HEAD} differs from {_EMBEDDING}")
    return Loaded(_combined_digest(digests), scales.scales(model.embedding.device))


def weights_digest(model_path: Path) -> str:
    """What `load_weights` would say: over each tensor's name, shape, dtype and some pages. Raises ModelError."""
    return _combined_digest({name: _tensor_digest(tensor) for name, tensor in _stream(model_path)})


def checkpoint_dtype(model_path: Path) -> torch.dtype:
    """The dtype that most of the checkpoint's tensors have, weighed by size. Raises ModelError."""
    sizes: dict[torch.dtype, int] = {}
    for _, tensor in _stream(model_path):
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    if not sizes:
        raise ModelError(f"{model_path} holds no tensors")
    return max(sizes, key=lambda dtype: sizes[dtype])


def plan_placements(config: ModelConfig) -> dict[str, Placement]:
    """Every tensor that a checkpoint of this config must hold, by its name in the checkpoint."""
    table = (config.vocab_size, config.hidden_size)
    placements = {
        _EMBEDDING: Placement("embedding", 0, table),
        "model.norm.weight": Placement("norm.weight", 0, (config.hidden_size,)),
    }
    if not config.tied_embeddings:
        placements[_LM_HEAD] = Placement("lm_head", 0, table)
    for index in range(config.num_layers):
        for name, placement in _layer_placements(config):
            placements[f"model.layers.{index}.{name}"] = Placement(
                f"layers.{index}.{placement.parameter}", placement.row_start, placement.shape
            )
    return placements


def _layer_placements(config: ModelConfig) -> Iterator[tuple[str, Placement]]:
    """Names and parameters relative to one layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.q_size, config.kv_size
    yield "input_layernorm.weight", Placement("attention_norm.weight", 0, (hidden,))
    yield "post_attention_layernorm.weight", Placement("mlp_norm.weight", 0, (hidden,))
    yield from _linear("self_attn.q_proj", "attention.qkv", 0, q_size, hidden, config.qkv_bias)
    yield from _linear("self_attn.k_proj", "attention.qkv", q_size, kv_size, hidden, config.qkv_bias)
    yield from _linear("self_attn.v_proj", "attention.qkv", q_size + kv_size, kv_size, hidden, config.qkv_bias)
    yield from _linear("self_attn.o_proj", "attention.out", 0, hidden, q_size, config.o_bias)
    yield from _linear("mlp.gate_proj", "mlp.gate_up", 0, inner, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", "mlp.gate_up", inner, inner, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", "mlp.down", 0, hidden, inner, config.mlp_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", Placement("attention.query_norm.weight", 0, (config.head_dim,))
        yield "self_attn.k_norm.weight", Placement("attention.key_norm.weight", 0, (config.head_dim,))


def _linear(
    name: str, module: str, row_start: int, out_features: int, in_features: int, bias: bool
) -> Iterator[tuple[str, Placement]]:
    yield f"{name}.weight", Placement(f"{module}.weight", row_start, (out_features, in_features))
    if bias:
        yield f"{name}.bias", Placement(f"{module}.bias", row_start, (out_features,))


def _placement_of(name: str, tensor: torch.Tensor, placements: Mapping[str, Placement]) -> Placement:
    placement = placements.get(name)
    if placement is None:
        raise ModelError(f"surplus weight {name}: the model has no place for it")
    if tuple(tensor.shape) != placement.shape:
        raise ModelError(f"weight {name} has shape {list(tensor.shape)}, the config asks for {list(placement.shape)}")
    if not tensor.is_floating_point():
        raise ModelError(f"weight {name} is {tensor.dtype}: quantized checkpoints are not supported")
    return placement


def _stream(model_path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the checkpoint that count, one at a time, memory-mapped."""
    seen: set[str] = set()
    for file in _weight_files(model_path):
        for name, tensor in _stream_file(file):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old checkpoints carry it; it follows from the config
            if name in seen:
                raise ModelError(f"weight {name} is in more than one file of {model_path}")
            seen.add(name)
            yield name, tensor


def _stream_file(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (the handle is no mapping)
                yield name, tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read weights from {file}: {error}") from error


def _weight_files(model_path: Path) -> list[Path]:
    """The one file, or the shards that the index names."""
    index_file = model_path / _SHARD_INDEX
    if not index_file.exists():
        if not (model_path / _SINGLE_FILE).exists():
            raise ModelError(f"{model_path} holds neither {_SINGLE_FILE} nor {_SHARD_INDEX}")
        return [model_path / _SINGLE_FILE]
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_file} has no usable weight_map")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index_file} names shards outside of its folder")
    return [model_path / name for name in names]


def _tensor_digest(tensor: torch.Tensor) -> str:
    """Over shape, dtype and up to 16 evenly spaced pages of 4 KiB, first and last included."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    digest = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    last_page = max(0, raw.numel() - _PAGE_BYTES)
    starts = {last_page * step // (_SAMPLED_PAGES - 1) for step in range(_SAMPLED_PAGES)}
    for start in sorted(starts):
        digest.update(raw[start : start + _PAGE_BYTES].numpy().tobytes())
    return digest.hexdigest()


def _combined_digest(digests: Mapping[str, str]) -> str:
    """Over names and digests of all tensors, whatever their order and the files that they came in. A head that is a
    copy of the embedding may be there or not."""
    kept = {name for name in digests if name != _LM_HEAD or digests[name] != digests.get(_EMBEDDING)}
    joined = "".join(f"{name} {digests[name]} " for name in sorted(kept))
    return hashlib.sha256(joined.encode()).hexdigest()[:32]
