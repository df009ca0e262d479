"""Text to token ids and back for `engine.offline`, with the tokenizer of the checkpoint.

The gateway has its own (`gateway/tokenizer.py`), with what strangers' input makes necessary; a test holds that both
give the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.errors import ModelError, RejectedError

Message = Mapping[str, str]
"""One message of a chat: "role" (system, user or assistant) and "content", which is text."""


class OfflineTokenizer:
    """Wraps a transformers tokenizer that is backed by the `tokenizers` library."""

    def __init__(self, hf_tokenizer: Any) -> None:
        """`hf_tokenizer`: a transformers PreTrainedTokenizerFast. Raises ModelError for any other kind."""
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError("the model's tokenizer has no fast version (tokenizer.json), which is needed here")
        self._hf = hf_tokenizer
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def load(cls, folder: Path) -> "OfflineTokenizer":
        """From a checkpoint folder. Raises ModelError."""
        from transformers import AutoTokenizer  # slow to import, and only needed here

        try:
            return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"no tokenizer could be loaded from {folder}: {error}") from error

    @property
    def hf_tokenizer(self) -> Any:
        """The transformers tokenizer itself."""
        return self._hf

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens (such as BOS) if the checkpoint wants any."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise RejectedError("prompt: can't be encoded; does it hold half a surrogate pair?") from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `token_ids`; ids outside of the vocabulary have none."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The chat as the text that the model was trained on. Raises RejectedError for messages that are none, and if
        the model has no template, or it refuses."""
        if not self._hf.chat_template:
            raise RejectedError("messages: this model has no chat template; give it a prompt")
        chat = [message.for_template() for message in _checked_messages(messages)]
        try:
            text: str = self._hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program: on unexpected input it can raise anything
            raise RejectedError(f"messages: the chat template can't render them: {error}") from error
        return text


class _ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str

    def for_template(self) -> dict[str, str]:
        """`developer` is the newer name of `system`, which is the one that templates know."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


def _checked_messages(messages: Any) -> list[_ChatMessage]:
    try:
        checked = msgspec.convert(messages, list[_ChatMessage], strict=True)
    except msgspec.ValidationError as error:
        place = str(error).replace("`", "").replace(" - at $", ", at messages")
        raise RejectedError(f"messages: {place}") from None
    if not checked:
        raise RejectedError("messages: must not be empty")
    return checked
