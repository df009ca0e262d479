"""What results of `kvsplice generate` are marked with: all that has decided about them, their line and the model."""

import hashlib
from functools import cached_property
from pathlib import Path

from engine.checkpoint_digest import checkpoint_digest
from launcher.default_model import resolve_model
from launcher.prompt_lines import PromptLine


class ResultDigests:
    """The model is looked at when a digest is first asked for: lines that are wrong are told before it is fetched."""

    def __init__(self, model: str) -> None:
        """`model`: a name or a folder, as for `resolve_model`."""
        self._model = model

    @cached_property
    def folder(self) -> Path:
        """That of the checkpoint. Raises ModelUnavailableError."""
        return resolve_model(self._model)

    def of(self, line: PromptLine) -> str:
        """Raises ModelUnavailableError, and ModelError for a checkpoint that can't be read."""
        digest = hashlib.blake2b(digest_size=8, person=b"kvsplice result")
        digest.update(f"{line.digest} {self._checkpoint}".encode())
        return digest.hexdigest()

    @cached_property
    def _checkpoint(self) -> str:
        return checkpoint_digest(self.folder)
