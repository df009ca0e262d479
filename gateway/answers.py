"""OpenAI's answer objects as plain dicts: whole answers and stream chunks, for completions and for chats."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(eq=False)
class Usage:
    """Tokens of a call over all its prompts. `num_completion` grows as tokens come; `num_cached`: prompt tokens that
    were found in a prefix cache."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


class AnswerShape(Protocol):
    """Where completions and chats differ. `finish_reason` is None while a choice goes on."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, text: str, finish_reason: str) -> Json:
        """A choice of a whole answer."""
        ...

    def opening(self, index: int) -> Json | None:
        """The chunk choice that comes before any text, if there is one."""
        ...

    def chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """A choice of a stream chunk."""
        ...


class CompletionShape:
    """`/v1/completions`."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, text: str, finish_reason: str) -> Json:
        return self.chunk_choice(index, text, finish_reason)

    def opening(self, index: int) -> Json | None:
        return None

    def chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        return self._chunk(index, {"content": text} if text else {}, finish_reason)

    def _chunk(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


@dataclass(frozen=True)
class Envelope:
    """What all objects of one call share. `created`: Unix time, seconds."""

    id: str
    created: int
    model: str
    shape: AnswerShape = field(repr=False)

    def answer(self, choices: Sequence[Json], usage: Usage) -> Json:
        return {**self._head(self.shape.object), "choices": list(choices), "usage": usage.to_json()}

    def chunk(self, choices: Sequence[Json]) -> Json:
        return {**self._head(self.shape.chunk_object), "choices": list(choices)}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
