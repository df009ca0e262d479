"""What a request may ask for together with `use_beam_search`. Nothing that has no effect there is taken."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gateway.beam_search import BeamRules
from gateway.errors import InvalidFieldError
from gateway.schemas import GenerationRequest
from gateway.structured import asked_grammar
from kvtransfer.request_parts import MAX_LOGPROBS

MAX_BEAM_WIDTH: Final = MAX_LOGPROBS // 2
"""Each beam goes on with twice as many tokens as there are beams, and workers tell so many."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "temperature": (0.0, 1.0),  # 1 is what a request has that says nothing; beams are scored as at 1
        "top_p": (1.0,),
        "top_k": (0, -1),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
        "logit_bias": ({},),
        "seed": (None,),
        "min_tokens": (0,),
        "stop": ([],),
        "bad_words": ([],),
        "allowed_token_ids": (None,),
        "stream": (False,),
    }
)
"""Fields that go with beams only at these values."""


def check_beam_fields(request: GenerationRequest) -> None:
    """Raises InvalidFieldError."""
    if not request.use_beam_search:
        if request.length_penalty != 1.0:
            raise InvalidFieldError("length_penalty: only with use_beam_search true", param="length_penalty")
        return
    for name, neutral in _NEUTRAL.items():
        if getattr(request, name) not in neutral:
            raise _refusal(name)
    if (grammar := asked_grammar(request)) is not None:
        raise _refusal(grammar.field)
    if request.num_scores is not None:
        raise _refusal("prompt_logprobs" if request.prompt_logprobs is not None else "echo", " and logprobs")
    if request.asked_max_tokens == 0:
        raise _refusal("max_tokens", " 0")
    if request.num_choices > MAX_BEAM_WIDTH:
        field = "n" if request.n > MAX_BEAM_WIDTH else "best_of"
        raise InvalidFieldError(f"{field}: at most {MAX_BEAM_WIDTH} with use_beam_search", param=field)


def beam_rules(request: GenerationRequest, eos_token_ids: frozenset[int]) -> BeamRules | None:
    """How a checked request is searched for; None if it is not."""
    if not request.use_beam_search:
        return None
    ends = frozenset() if request.ignore_eos else eos_token_ids
    stop_ids = ends | frozenset(request.stop_token_ids)
    return BeamRules(request.num_choices, request.n, request.length_penalty, stop_ids, request.num_logprobs)


def _refusal(field: str, more: str = "") -> InvalidFieldError:
    return InvalidFieldError(f"{field}{more} can't be had with use_beam_search; leave it out", param=field)
