"""What all endpoints share: the parts of the gateway, and the checks that each call goes through."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from gateway.answers import AnswerShape
from gateway.asgi import Receive, Scope, read_json_body
from gateway.backend import Backend, Traits, UnavailableError
from gateway.beam_fields import beam_rules, check_beam_fields
from gateway.choice_text import ChoiceRules
from gateway.choices import Choice
from gateway.constraints import ConstraintCheck, Constraints
from gateway.echo import Echo
from gateway.errors import InvalidFieldError, ModelNotFoundError, excerpt
from gateway.generation import Call, Generation
from gateway.limits import HttpSettings
from gateway.logprob_answers import LogprobStyle
from gateway.metrics import Metrics
from gateway.modes import Mode
from gateway.prompts import PromptEncoder
from gateway.sampling import check_sampling_ids, draw_seed, sampling_for
from gateway.schemas import GenerationRequest, StreamOptions
from gateway.token_texts import TokenTexts
from gateway.tokenizer import Tokenizer
from gateway.validation import FieldRules, convert, known_fields, parse_object
from kvtransfer.request_parts import MAX_PROMPT_LOGPROBS, SamplingParams

_Request = TypeVar("_Request")


@dataclass(frozen=True)
class Service:
    """The gateway's parts, as endpoints need them. `created`: Unix time of the start, seconds."""

    backend: Backend
    tokenizer: Tokenizer
    settings: HttpSettings
    metrics: Metrics
    prompts: PromptEncoder
    constraints: ConstraintCheck
    generation: Generation
    token_texts: TokenTexts
    created: int

    def check_model(self, model: str | None) -> str:
        """The served name that the request means; the first one if it names none. Raises ModelNotFoundError."""
        names = self.settings.served_model_names
        if model is None:
            return names[0]
        if model not in names:
            raise ModelNotFoundError(f"the model {excerpt(model)!r} is not served here", param="model")
        return model

    def max_model_len(self, mode: Mode | None) -> int:
        """Raises UnavailableError, with the reasons, while requests of this mode can't be served."""
        status = self.backend.status(mode)
        if not status.ready or status.max_model_len is None:
            raise UnavailableError("; ".join(status.reasons) or "the cluster is not ready")
        return status.max_model_len

    def check_generation(self, request: GenerationRequest) -> None:
        """What can be told before tokenising. Raises InvalidFieldError."""
        check_sampling_ids(request, self.tokenizer.num_ids)
        if request.stream_options is not None and not request.stream:
            raise InvalidFieldError("stream_options: only with stream true", param="stream_options")
        check_beam_fields(request)

    def check_num_scores(self, request: GenerationRequest, prompts: Sequence[tuple[int, ...]]) -> None:
        """Raises InvalidFieldError if the log probabilities of all prompts together are too many for one answer, or are
        those of several choices, of which none has a prompt of its own."""
        if request.num_scores is None:
            return
        field = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
        if request.num_choices > 1:
            raise InvalidFieldError(
                f"{field}: log probabilities of a prompt are told with one choice alone, n and best_of 1", param=field
            )
        num_tokens = sum(map(len, prompts))
        if num_tokens * (1 + request.num_scores) > MAX_PROMPT_LOGPROBS:
            raise InvalidFieldError(
                f"{field}: {num_tokens} prompt tokens with {request.num_scores} alternatives each are more than the "
                f"{MAX_PROMPT_LOGPROBS} log probabilities that one call may ask for",
                param=field,
            )

    def logprob_style(self, request: GenerationRequest) -> LogprobStyle:
        return LogprobStyle(
            self.token_texts, request.num_logprobs, request.prompt_logprobs, request.return_tokens_as_token_ids
        )

    def _check_num_choices(self, num_choices: int) -> None:
        """More at once than the server ever runs would be told to try again later, for ever."""
        limit = self.settings.max_concurrent_requests
        if num_choices > limit:
            raise InvalidFieldError(
                f"n: the call asks for {num_choices} choices in all, and {limit} requests may run at once", param="n"
            )

    def make_call(
        self,
        request: GenerationRequest,
        shape: AnswerShape,
        prompts: Sequence[tuple[int, ...]],
        *,
        constraints: Constraints,
        max_model_len: int,
        default_max_tokens: int,
        started_at: float,
        mode: Mode | None,
        echoes: Sequence[Echo | None] = (None,),
    ) -> Call:
        """The call for these prompts, which share one seed: the choices of each in turn; with beams, one that all of
        them begin from. Raises ContextLengthError, InvalidFieldError."""
        self._check_num_choices(len(prompts) * request.n)
        seed = draw_seed(self.settings.default_seed) if request.seed is None else request.seed
        sampling_of = partial(
            sampling_for,
            request,
            max_model_len=max_model_len,
            default_max_tokens=default_max_tokens,
            seed=seed,
            constraints=constraints,
        )
        return Call(
            shape=shape,
            model=self.check_model(request.model),
            choices=_choices(request, mode, prompts, echoes, sampling_of),
            rules=_text_rules(request),
            stream=(request.stream_options or StreamOptions()) if request.stream else None,
            started_at=started_at,
            num_kept=request.n if request.is_ranked else None,
            beams=beam_rules(request, self.backend.status(mode).eos_token_ids),
        )


async def read_request(scope: Scope, receive: Receive, request_type: type[_Request], rules: FieldRules) -> _Request:
    """The checked request in the body. Raises ApiError."""
    fields: Mapping[str, Any] = parse_object(await read_json_body(scope, receive))
    return convert(known_fields(fields, request_type, rules), request_type)


def _choices(
    request: GenerationRequest,
    mode: Mode | None,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[Echo | None],
    sampling_of: Callable[[int], SamplingParams],
) -> tuple[Choice, ...]:
    """Those of each prompt in turn, numbered through. `sampling_of` a prompt's number of tokens."""
    traits = Traits(request.cache_salt or "", request.priority, mode)
    choices: list[Choice] = []
    for prompt, echo in zip(prompts, echoes, strict=True):
        sampling = sampling_of(len(prompt))
        for choice_index in range(1 if request.use_beam_search else request.num_choices):
            drawn = structs.replace(sampling, choice_index=choice_index)
            choices.append(Choice(len(choices), prompt, drawn, traits, echo))
    return tuple(choices)


def _text_rules(request: GenerationRequest) -> ChoiceRules:
    return ChoiceRules(
        stops=request.stops,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.min_tokens,
        only_prompt=request.asked_max_tokens == 0,
    )
