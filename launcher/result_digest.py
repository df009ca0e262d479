"""What results of `kvsplice generate` are marked with: all that has decided about them, their line and the model."""

import hashlib
from functools import cached_property
from pathlib import Path

from engine.checkpoint_digest import CheckpointDigest, files_digest
from engine.errors import ModelError
from launcher.default_model import resolve_model
from launcher.prompt_lines import PromptLine


class ResultDigests:
    """The model is looked at once, when a digest is first asked for or `look` is called: what is done to its folder
    after it has been loaded is none of the results' affair."""

    def __init__(self, model: str) -> None:
        """`model`: a name or a folder, as for `resolve_model`."""
        self._model = model

    @cached_property
    def folder(self) -> Path:
        """That of the checkpoint. Raises ModelUnavailableError."""
        return resolve_model(self._model)

    def look(self) -> None:
        """Before the model is loaded. Raises ModelUnavailableError, and ModelError for one that can't be read."""
        _ = self._checkpoint

    def check_loaded(self, weights: str) -> None:
        """`weights`: digest of those that have been loaded. Raises ModelError unless the folder has been the same since
        `look`."""
        if CheckpointDigest(files_digest(self.folder), weights) != self._checkpoint:
            raise ModelError(f"{self.folder} has changed while it was loaded; start again when it is complete")

    def of(self, line: PromptLine) -> str:
        """Raises as `look` does."""
        digest = hashlib.blake2b(digest_size=8, person=b"kvsplice result")
        digest.update(f"{line.digest} {self._checkpoint}".encode())
        return digest.hexdigest()

    @cached_property
    def _checkpoint(self) -> CheckpointDigest:
        return CheckpointDigest.of(self.folder)
