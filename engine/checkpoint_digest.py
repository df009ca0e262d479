"""A name for what a checkpoint folder holds: it changes when anything does that decides about tokens or text, as good
as always. Of weights some pages are looked at: an edit of a few numbers of a big tensor may lie between them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import ModelError
from engine.weights import weights_digest

DECIDING_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Beside the weights: what the model is, what ends an output, and what lies between text and tokens."""


@dataclass(frozen=True)
class CheckpointDigest:
    """`weights`: as the engine's fingerprint has it. `files`: of all the others."""

    files: str
    weights: str

    @classmethod
    def of(cls, folder: Path) -> "CheckpointDigest":
        """The files whole, and of each tensor up to 16 pages: takes about a second for gigabytes. Raises ModelError."""
        return cls(files_digest(folder), weights_digest(folder))

    def __str__(self) -> str:
        return f"{self.files} {self.weights}"


def files_digest(folder: Path) -> str:
    """Over DECIDING_FILES, those that there are. Raises ModelError."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvsplice model")
    for file in (file for name in DECIDING_FILES for file in sorted(folder.glob(name))):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from error
        digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()
