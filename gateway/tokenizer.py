"""Text to token ids and back, and chats to text, with the tokenizer of the checkpoint. Needs no torch."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from tokenizers import models

from gateway.chat_template import template_variables
from gateway.errors import InvalidFieldError, excerpt
from grammar.vocabulary import digest_of
from kvtransfer.errors import SettingsError

Message = Mapping[str, str]
"""One message of a chat: "role", "content" and possibly "name"."""


class Tokenizer:
    """Wraps a transformers tokenizer that is backed by the `tokenizers` library. Safe to use from several threads:
    nothing changes after it is made."""

    def __init__(self, hf_tokenizer: Any) -> None:
        """`hf_tokenizer`: a transformers PreTrainedTokenizerFast. Raises SettingsError for any other kind."""
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise SettingsError("the model's tokenizer has no fast version (tokenizer.json), which is needed here")
        self._hf = hf_tokenizer
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """From a checkpoint folder or hub name. Raises SettingsError."""
        from transformers import AutoTokenizer  # slow to import, and only needed here

        try:
            return cls(AutoTokenizer.from_pretrained(path, trust_remote_code=False))
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"no tokenizer could be loaded from {path}: {error}") from error

    @cached_property
    def num_ids(self) -> int:
        """Token ids are in [0, num_ids)."""
        largest: int = max(self._backend.get_vocab(with_added_tokens=True).values())
        return largest + 1

    @cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters of a text than this."""
        return max(len(token) for token in self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def vocabulary_digest(self) -> str:
        """Names the tokens to workers, which compare."""
        return digest_of(self._backend)

    def to_json(self) -> str:
        """As in a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without tokenising. Other models than BPE may take any length of
        text for one unknown token, so they have none."""
        return 0 if not isinstance(self._backend.model, models.BPE) else -(-len(text) // self.max_token_chars)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; with special tokens (such as BOS) if the checkpoint wants any.

        As a batch of one: only the batched calls of `tokenizers` let other threads run meanwhile.
        """
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`; ids outside of the vocabulary have none."""
        text: str
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """How the vocabulary writes a token; None for ids outside of it."""
        written: str | None = self._backend.id_to_token(token_id)
        return written

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads and a client may set. Raises InvalidFieldError if there is no template."""
        own = inspect.signature(self._hf.apply_chat_template).parameters  # would not reach the template
        return template_variables(self._chat_template()).difference(own)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The chat as text. `variables` are for the template and must be among `template_variables`.

        Raises InvalidFieldError if there is no template or it refuses the messages.
        """
        template = self._chat_template()
        try:
            rendered: str = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise InvalidFieldError(f"the chat template says: {excerpt(str(error))}", param="messages") from error
        except Exception as error:  # a template is a program: on unexpected input it can raise anything
            raise InvalidFieldError("the chat template can't render these messages", param="messages") from error
        return rendered

    def _chat_template(self) -> str:
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise InvalidFieldError("this model has no chat template; use /v1/completions", param="messages")
        text: str = template
        return text
