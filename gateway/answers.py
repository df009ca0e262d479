"""OpenAI's answer objects as plain dicts: whole answers and stream chunks, for completions and for chats."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.choice_text import TextDelta
from gateway.logprob_answers import Json, LogprobStyle


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
    """Where completions and chats differ. A whole choice is all of its deltas in one."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, whole: TextDelta) -> Json:
        """A choice of a whole answer."""
        ...

    def opening(self, index: int) -> Json | None:
        """The chunk choice that comes before any text, if there is one."""
        ...

    def chunk_choice(self, delta: TextDelta) -> Json:
        """A choice of a stream chunk."""
        ...

    def beside_choices(self, deltas: Sequence[TextDelta]) -> Json:
        """What an answer or a chunk with these choices says beside them."""
        ...


@dataclass(frozen=True)
class CompletionShape:
    """`/v1/completions`."""

    style: LogprobStyle
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, whole: TextDelta) -> Json:
        return {**self.chunk_choice(whole), "logprobs": self.style.of_completion(whole.tokens)}

    def opening(self, index: int) -> Json | None:
        return None

    def chunk_choice(self, delta: TextDelta) -> Json:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self.style.of_completion(delta.tokens) if delta.tokens else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.prompt is not None and self.style.num_prompt_top is not None:
            choice["prompt_logprobs"] = self.style.of_prompt(delta.prompt)
        return choice

    def beside_choices(self, deltas: Sequence[TextDelta]) -> Json:
        return {}


@dataclass(frozen=True)
class ChatShape:
    """`/v1/chat/completions`. What there is to say of the prompt stands beside the choices, which share it."""

    style: LogprobStyle
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, whole: TextDelta) -> Json:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        return {
            "index": whole.index,
            "message": message,
            "logprobs": self.style.of_chat(whole.tokens),
            "finish_reason": whole.finish_reason,
        }

    def opening(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk_choice(self, delta: TextDelta) -> Json:
        logprobs = self.style.of_chat(delta.tokens) if delta.tokens else None
        return self._chunk(delta.index, {"content": delta.text} if delta.text else {}, logprobs, delta.finish_reason)

    def beside_choices(self, deltas: Sequence[TextDelta]) -> Json:
        prompt = next((delta.prompt for delta in deltas if delta.prompt is not None and delta.index == 0), None)
        if prompt is None or self.style.num_prompt_top is None:
            return {}
        return {"prompt_logprobs": self.style.of_prompt(prompt)}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(frozen=True)
class Envelope:
    """What all objects of one call share. `created`: Unix time, seconds."""

    id: str
    created: int
    model: str
    shape: AnswerShape = field(repr=False)

    def answer(self, choices: Sequence[TextDelta], usage: Usage) -> Json:
        return {
            **self._head(self.shape.object),
            "choices": [self.shape.choice(choice) for choice in choices],
            "usage": usage.to_json(),
            **self.shape.beside_choices(choices),
        }

    def chunk(self, choices: Sequence[Json], more: Json | None = None) -> Json:
        return {**self._head(self.shape.chunk_object), "choices": list(choices), **(more or {})}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
