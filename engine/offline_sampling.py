"""What a program asks of one generation: how to draw tokens, when to stop, what of the text to keep. Knows no torch.

Names, bounds and meanings are those of the HTTP API's fields.
"""

import math
import secrets
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from engine.errors import RejectedError
from engine.sampling_bounds import MAX_STOPS, StopString, Temperature, TopK
from engine.shown_text import TextRules
from kvtransfer import request_parts
from kvtransfer.codec import Count, Fraction, Positive
from kvtransfer.request_parts import MAX_STOP_TOKEN_IDS, TokenId

DEFAULT_MAX_TOKENS: Final = 16


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued. Checked when made: raises RejectedError that names the field.

    `max_tokens`: None means as many as the model has room for. `seed`: equal seeds give equal outputs for equal
    prompts, whatever runs beside them; None takes the LLM's, or a fresh one. `temperature`: 0 is greedy. `top_k`: 0 or
    -1 is off. `stop`: text that ends the output, not shown unless `include_stop_str_in_output`. `stop_token_ids` count
    beside the model's EOS ids, which `ignore_eos` switches off. `logit_bias`: token id to an addend of its logit.
    """

    max_tokens: Positive | None = DEFAULT_MAX_TOKENS
    temperature: Temperature = 1.0
    top_p: request_parts.TopP = 1.0
    top_k: TopK = 0
    min_p: Fraction = 0.0
    repetition_penalty: request_parts.RepetitionPenalty = 1.0
    presence_penalty: request_parts.Penalty = 0.0
    frequency_penalty: request_parts.Penalty = 0.0
    logit_bias: request_parts.LogitBias = field(default_factory=dict)
    seed: request_parts.Seed | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop: StopString | Annotated[tuple[StopString, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kind))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RejectedError(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {self.max_tokens}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "SamplingParams":
        """From fields by name, as in a JSON object. Raises RejectedError, also for names that there are not."""
        unknown = sorted(set(fields) - set(typing.get_type_hints(cls)))
        if unknown:
            raise RejectedError(f"{unknown[0][:64]!r}: unknown sampling field")
        return cls(**fields)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def text_rules(self) -> TextRules:
        return TextRules(self.stops, self.include_stop_str_in_output, self.skip_special_tokens, self.min_tokens)

    def for_prompt(self, num_prompt: int, max_model_len: int, default_seed: int | None) -> request_parts.SamplingParams:
        """What the engine takes, for a prompt of `num_prompt` tokens; a seed is drawn if there is none."""
        seed = default_seed if self.seed is None else self.seed
        return request_parts.SamplingParams(
            max_tokens=max(1, max_model_len - num_prompt) if self.max_tokens is None else self.max_tokens,
            seed=secrets.randbits(63) if seed is None else seed,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


def _checked(name: str, value: Any, kind: Any) -> Any:
    """`value` as a `kind`: a whole number may become one with a point, a list a tuple, and nothing else changes."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RejectedError(f"{name}: must be a finite number")
    try:
        return msgspec.convert(value, kind, strict=True, str_keys=True)  # keys of a JSON object are strings
    except msgspec.ValidationError as error:
        raise RejectedError(f"{name}: {_plain(str(error))}") from None


def _plain(message: str) -> str:
    """msgspec's message without its quotes and its root."""
    return message.replace("`", "").replace(" - at $", ", at ").removesuffix(", at ")
