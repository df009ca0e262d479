"""From what a program gives (text, token ids or a chat) to a request that the engine is sure to serve."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import ArgumentTypeError, RejectedError
from engine.offline_sampling import SamplingParams
from engine.offline_tokenizer import Message, OfflineTokenizer
from kvtransfer.request_parts import MAX_PROMPT_TOKENS, MAX_TOKEN_ID, RequestSpec

Prompt = str | Sequence[int]
"""Text, or token ids as they are."""


@dataclass(frozen=True)
class Job:
    """A checked prompt and how to continue it. `prompt`: its text, None if it came as token ids."""

    prompt: str | None
    params: SamplingParams
    spec: RequestSpec


class JobMaker:
    """Makes jobs; `check` raises RejectedError for a request that the engine can never serve."""

    def __init__(
        self,
        tokenizer: OfflineTokenizer,
        check: Callable[[RequestSpec], None],
        max_model_len: int,
        default_seed: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._check = check
        self._max_model_len = max_model_len
        self._default_seed = default_seed
        self._numbers = itertools.count()

    def of_prompt(self, prompt: Prompt, params: SamplingParams) -> Job:
        """Raises RejectedError."""
        if isinstance(prompt, str):
            return self._job(prompt, self._tokenizer.encode(prompt, add_special_tokens=True), params)
        return self._job(None, _checked_ids(prompt), params)

    def of_chat(
        self, messages: Sequence[Message], params: SamplingParams, *, add_generation_prompt: bool = True
    ) -> Job:
        """The chat in the model's own template. Raises RejectedError."""
        text = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self._job(text, self._tokenizer.encode(text, add_special_tokens=False), params)

    def _job(self, prompt: str | None, token_ids: Sequence[int], params: SamplingParams) -> Job:
        if not isinstance(params, SamplingParams):
            raise ArgumentTypeError(f"sampling_params: must be SamplingParams, not {type_name(params)}")
        if not token_ids:
            raise RejectedError("prompt: has no tokens")
        sampling = params.for_prompt(len(token_ids), self._max_model_len, self._default_seed)
        spec = RequestSpec(f"offline-{next(self._numbers)}", 0, tuple(token_ids), sampling)
        self._check(spec)
        return Job(prompt, params, spec)


def without_array(given: Any) -> Any:
    """An array or a tensor as lists; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def type_name(given: Any) -> str:
    """As errors name the type of what a program has given."""
    return type(given).__name__


def _checked_ids(prompt: Any) -> list[int]:
    try:
        token_ids = msgspec.convert(without_array(prompt), list[int], strict=True)
    except msgspec.ValidationError:
        raise ArgumentTypeError("prompt: must be text or a list of token ids") from None
    if len(token_ids) > MAX_PROMPT_TOKENS or any(not 0 <= token_id <= MAX_TOKEN_ID for token_id in token_ids):
        raise RejectedError(f"prompt: at most {MAX_PROMPT_TOKENS} token ids, each from 0 to {MAX_TOKEN_ID}")
    return token_ids
