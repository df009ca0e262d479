"""The requests of the API, field by field: OpenAI's, and vLLM's extras.

Each type has its `FieldRules` in `gateway.field_rules`. Bounds that offline runs have as well are in
`engine.sampling_bounds`, those of the workers in `kvtransfer.request_parts`, the others here; `gateway.validation`
turns a breach into a 400.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from engine.sampling_bounds import MAX_STOPS, StopString, Temperature, TopK
from kvtransfer.codec import Count, Fraction, Positive
from kvtransfer.request_parts import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCES,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_STOP_TOKEN_IDS,
    LogitBias,
    NumLogprobs,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    TokenId,
    TopP,
)

MAX_SALT_CHARS: Final = 512
MAX_BAD_WORDS: Final = MAX_BAD_SEQUENCES // 2
"""Each is told to workers as two sequences: at the beginning of a text and behind a blank."""
MAX_BAD_WORD_CHARS: Final = 256
MAX_OUTPUT_CHOICES: Final = 4096

Stops = Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)]
NumChoices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS, pattern=r"\S")]
GrammarText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Schema = GrammarText | dict[str, Any]
OutputChoices = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1, max_length=MAX_OUTPUT_CHOICES)
]
TemplateValue = str | int | float | bool


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all requests."""


class StreamOptions(Fields, frozen=True, kw_only=True):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Fields, frozen=True, kw_only=True):
    """What completions and chats have in common. `n`: choices of each prompt. `top_k`: 0 or -1 is off. `cache_salt`: KV
    is shared only among requests with the same one. `priority`: the smaller, the sooner, where workers schedule by it.
    `prompt_logprobs`: alternatives beside each prompt token's log probability. `truncate_prompt_tokens`: only so many
    of the prompt's last tokens are used, -1: as many as leave room for the output. `response_format`,
    `structured_outputs` and the `guided_` fields are read by `gateway.structured`. `use_beam_search`: the choices are
    the best of as many beams, see `gateway.beam_fields`."""

    model: str | None = None
    n: NumChoices = 1
    max_tokens: Positive | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Fraction = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    seed: Seed | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop: StopString | Stops = []
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] = []
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = (
        None
    )
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: OutputChoices | None = None
    guided_grammar: GrammarText | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Priority = 0
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)] | None = None
    return_tokens_as_token_ids: bool = False
    use_beam_search: bool = False
    length_penalty: Annotated[float, msgspec.Meta(ge=-10.0, le=10.0)] = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each output token, None: nobody asks how likely it was."""
        raise NotImplementedError

    @property
    def num_scores(self) -> int | None:
        """The same of the prompt's tokens, as workers are asked for them."""
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        """Choices of each prompt that are generated; the best `n` of them are the answer."""
        return self.n

    @property
    def is_ranked(self) -> bool:
        """Whether choices are drawn that the answer leaves out."""
        return self.num_choices > self.n and not self.use_beam_search


class JsonSchemaFormat(Fields, frozen=True, kw_only=True):
    """`response_format.json_schema`. The schema is followed whether `strict` or not; `description` is for people."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields, frozen=True, kw_only=True):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Fields, frozen=True, kw_only=True):
    """vLLM's newer way to ask for a form. One of them."""

    json: Schema | None = None
    json_object: bool = False
    regex: GrammarText | None = None
    choice: OutputChoices | None = None
    grammar: GrammarText | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """`prompt`: text, token ids, or a list of either. `best_of`: choices to generate, of which the answer has the best
    `n` (`gateway.ranking`); without it none are left out. With `echo` the answer begins with the prompt, and
    `max_tokens` may be 0: then that is all. `logprobs` may be false, which asks for nothing."""

    prompt: str | list[TokenId | str | list[TokenId]]
    best_of: NumChoices | None = None
    add_special_tokens: bool = True
    max_tokens: Count | None = None
    echo: bool = False
    logprobs: NumLogprobs | bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return None if isinstance(self.logprobs, bool) else self.logprobs

    @property
    def num_choices(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def num_scores(self) -> int | None:
        asked = [self.prompt_logprobs, self.num_logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """`messages` are checked one by one, as `ChatMessage`."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, TemplateValue] = {}
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatMessage(Fields, frozen=True, kw_only=True):
    """One message; a list of content parts may only hold text."""

    role: str
    content: str | list[dict[str, Any]]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None


class TextPart(Fields, frozen=True, kw_only=True):
    """`{"type": "text", "text": ...}` without its type."""

    text: str


class TokenizeRequest(Fields, frozen=True, kw_only=True):
    """Exactly one of `prompt` and `messages`. `add_special_tokens` is on for prompts and off for chats by default."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, TemplateValue] = {}


class DetokenizeRequest(Fields, frozen=True, kw_only=True):
    """Special tokens are shown."""

    model: str | None = None
    tokens: list[TokenId]
