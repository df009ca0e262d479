"""From what a request brings to token ids, within the model's length."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from gateway.echo import Echo, echo_of
from gateway.errors import ContextLengthError, InvalidFieldError, excerpt
from gateway.field_rules import MESSAGE_RULES
from gateway.schemas import ChatMessage, TextPart
from gateway.text_pool import TextPool
from gateway.tokenizer import Message, Tokenizer
from gateway.validation import FieldRules, convert_at

Prompt = str | list[int]

MAX_MESSAGES: Final = 8192
"""Each is checked on the event loop, which has other requests to serve."""
ROLES: Final = ("system", "developer", "user", "assistant")
_PART_RULES: Final = FieldRules(tolerated=frozenset(), unsupported={})


class PromptEncoder:
    """Makes token ids of prompts and chats. Work on text runs in the pool."""

    def __init__(self, tokenizer: Tokenizer, pool: TextPool) -> None:
        self._tokenizer = tokenizer
        self._pool = pool

    async def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        add_special_tokens: bool,
        max_model_len: int | None,
        num_kept: int | None = None,
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of each prompt, never empty, in order; the last `num_kept` of them, None: all. Raises
        InvalidFieldError, ContextLengthError."""
        for prompt in prompts:
            self._check(prompt, None if num_kept is not None else max_model_len)
        encoded = await self._pool.run(lambda: [self._encode(prompt, add_special_tokens) for prompt in prompts])
        if num_kept is not None:
            encoded = [ids[-num_kept:] for ids in encoded]
        for ids in encoded:
            check_prompt_length(len(ids), max_model_len)
        return tuple(encoded)

    async def echoes(
        self, prompts: Sequence[Prompt], encoded: Sequence[tuple[int, ...]], *, truncated: bool, with_offsets: bool
    ) -> tuple[Echo, ...]:
        """Each prompt as it stands in its answer; `truncated`: only `encoded` of it is used."""

        def make() -> tuple[Echo, ...]:
            given = [prompt if isinstance(prompt, str) and not truncated else None for prompt in prompts]
            pairs = zip(encoded, given, strict=True)
            return tuple(echo_of(self._tokenizer, *pair, with_offsets=with_offsets) for pair in pairs)

        return await self._pool.run(make)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The chat as the text that the model was trained on. Raises InvalidFieldError."""
        chat = chat_messages(messages)
        known = self._tokenizer.template_variables
        if unknown := next((name for name in variables if name not in known), None):
            raise InvalidFieldError(
                f"chat_template_kwargs: the template of this model does not use {excerpt(unknown)!r}, "
                f"but only: {', '.join(sorted(known)) or 'none'}",
                param="chat_template_kwargs",
            )
        return await self._pool.run(
            lambda: self._tokenizer.render_chat(chat, add_generation_prompt=add_generation_prompt, variables=variables)
        )

    def _check(self, prompt: Prompt, max_model_len: int | None) -> None:
        """What can be told without tokenising: that costs time in proportion to a text that may be far too long."""
        if not prompt:
            raise InvalidFieldError("prompt: must not be empty", param="prompt")
        if isinstance(prompt, str):
            least = self._tokenizer.min_num_tokens(prompt)
            if max_model_len is not None and least > max_model_len:
                raise _too_long(f"at least {least}", max_model_len)
            return
        check_prompt_length(len(prompt), max_model_len)
        check_token_ids("prompt", prompt, self._tokenizer.num_ids)

    def _encode(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        ids = tuple(self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        if not ids:
            raise InvalidFieldError("prompt: has no tokens", param="prompt")
        return ids


def split_prompts(prompt: str | Sequence[int | str | list[int]], max_prompts: int) -> list[Prompt]:
    """A text, a list of token ids, or a list of either, as a list of prompts. Raises InvalidFieldError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidFieldError("prompt: must not be empty", param="prompt")
    if _all_token_ids(prompt):
        return [list(prompt)]
    if len(prompt) > max_prompts:
        raise InvalidFieldError(f"prompt: {len(prompt)} prompts, at most {max_prompts} are allowed", param="prompt")
    prompts = [entry for entry in prompt if not isinstance(entry, int)]
    if len(prompts) < len(prompt) or len({type(entry) for entry in prompts}) != 1:
        raise InvalidFieldError("prompt: texts, token ids and lists of token ids can't be mixed", param="prompt")
    return prompts


def check_prompt_length(num_tokens: int, max_model_len: int | None) -> None:
    """There must be room for one token of output at least. None: not known, not checked."""
    if max_model_len is not None and num_tokens >= max_model_len:
        raise _too_long(str(num_tokens), max_model_len)


def truncation(asked: int | None, max_tokens: int | None, max_model_len: int) -> int | None:
    """How many of a prompt's last tokens are used, None: all. `max_tokens`: what the output may have, None: whatever is
    left. Raises InvalidFieldError."""
    if asked is None:
        return None
    if asked == 0 or asked > max_model_len:
        raise InvalidFieldError(
            f"truncate_prompt_tokens: must be -1 or in [1, {max_model_len}], not {asked}",
            param="truncate_prompt_tokens",
        )
    return asked if asked > 0 else max(1, max_model_len - max(1, max_tokens or 1))


def check_token_ids(field: str, token_ids: Sequence[int], num_ids: int) -> None:
    """Raises InvalidFieldError unless all ids are below `num_ids`."""
    if token_ids and max(token_ids) >= num_ids:
        raise InvalidFieldError(f"{field}: token ids must be in [0, {num_ids - 1}]", param=field)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Checked messages as chat templates expect them, text parts joined by line breaks.

    OpenAI's role `developer` is the newer name of `system`, which is the one that templates know.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidFieldError(
            f"messages: {len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages"
        )
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _chat_message(fields: Mapping[str, Any], where: str) -> Message:
    message: ChatMessage = convert_at(where, fields, ChatMessage, MESSAGE_RULES)
    if message.role not in ROLES:
        raise InvalidFieldError(f"{where}.role: must be one of {', '.join(ROLES)}", param=f"{where}.role")
    role = "system" if message.role == "developer" else message.role
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": _content(message.content, f"{where}.content"), **name}


def _content(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [_text_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if not parts:
        raise InvalidFieldError(f"{where}: must not be empty", param=where)
    return "\n".join(parts)


def _text_part(fields: Mapping[str, Any], where: str) -> str:
    if fields.get("type") != "text":
        raise InvalidFieldError(f"{where}.type: only 'text' is supported", param=f"{where}.type")
    rest = {name: value for name, value in fields.items() if name != "type"}
    part: TextPart = convert_at(where, rest, TextPart, _PART_RULES)
    return part.text


def _all_token_ids(prompt: Sequence[int | str | list[int]]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(entry, int) for entry in prompt)


def _too_long(num_tokens: str, max_model_len: int) -> ContextLengthError:
    return ContextLengthError(
        f"the prompt has {num_tokens} tokens, but this model takes at most {max_model_len} for prompt and output "
        f"together, of which the output needs one at least"
    )
