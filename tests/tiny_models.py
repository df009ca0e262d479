"""Tiny random checkpoints of every supported architecture, made on the fly: weights, tokenizer and chat template.

`save_tiny_model(name, folder)` gives a folder like any downloaded one. The same name gives the same weights.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
MAX_POSITIONS = 1024
BOS, EOS, END_OF_TURN, PAD = "<|bos|>", "<|eos|>", "<|im_end|>", "<|endoftext|>"
# PAD has the name that Qwen2's tokenizer class looks for: it adds what it misses, and would outgrow the vocabulary.
SPECIAL_TOKENS = (BOS, EOS, "<|im_start|>", END_OF_TURN, PAD)
BOS_ID, EOS_ID, END_OF_TURN_ID, PAD_ID = 0, 1, 3, 4
"""config.json names EOS_ID as the end, generation_config.json both EOS_ID and END_OF_TURN_ID."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a request is its tokens",
    "prefill and decode",
    "Grüße, 世界",
)


@dataclass(frozen=True)
class _Recipe:
    make: Callable[[Any], PreTrainedModel]
    config: Callable[..., Any]
    fields: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "llama2": _Recipe(LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
        "smollm2": _Recipe(
            LlamaForCausalLM,
            LlamaConfig,
            {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        ),
        "llama3": _Recipe(
            LlamaForCausalLM,
            LlamaConfig,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
            shard_size="60KB",
        ),
        "llama-linear-biased": _Recipe(
            LlamaForCausalLM,
            LlamaConfig,
            {
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            },
        ),
        "mistral": _Recipe(
            MistralForCausalLM, MistralConfig, {"sliding_window": 24, "num_key_value_heads": 1, "head_dim": 32}
        ),
        "qwen2": _Recipe(Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
        "qwen2-windowed": _Recipe(
            Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
        ),
        "qwen3": _Recipe(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}, "80KB"),
    }
)

TINY_MODELS = tuple(_RECIPES)


def save_tiny_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """Saves the tiny model `name` with its tokenizer in `folder` and returns that. `fields` change its config."""
    recipe = _RECIPES[name]
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    model = recipe.make(recipe.config(**{**base, **recipe.fields, **fields}))
    _randomise(model, seed=zlib.crc32(name.encode()))
    model.generation_config.eos_token_id = [EOS_ID, END_OF_TURN_ID]
    model.to(dtype).save_pretrained(folder, max_shard_size=recipe.shard_size)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over all 256 bytes with a few merges: any text goes in and comes out unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights wide enough for outputs that depend on the prompt; norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
