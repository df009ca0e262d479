"""A name for what a checkpoint folder holds: it changes when anything does that decides about tokens or text."""

import hashlib
from pathlib import Path
from typing import Final

from engine.errors import ModelError
from engine.weights import weights_digest

DECIDING_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Beside the weights: what the model is, what ends an output, and what lies between text and tokens."""


def checkpoint_digest(folder: Path) -> str:
    """Over these files and the weights, of which pages of each tensor are sampled: takes about a second for gigabytes.
    Raises ModelError."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvsplice model")
    for name in DECIDING_FILES:
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"cannot read {folder / name}: {error.strerror}") from error
        digest.update(f"{name} {len(content)} ".encode() + content)
    digest.update(weights_digest(folder).encode())
    return digest.hexdigest()
