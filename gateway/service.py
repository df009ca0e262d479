"""What all endpoints share: the parts of the gateway, and the checks that each call goes through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.answers import AnswerShape
from gateway.asgi import Receive, Scope, read_json_body
from gateway.backend import Backend, Traits, UnavailableError
from gateway.choice_text import TextRules
from gateway.choices import Choice
from gateway.constraints import ConstraintCheck, Constraints
from gateway.errors import InvalidFieldError, ModelNotFoundError, excerpt
from gateway.generation import Call, Generation
from gateway.limits import HttpSettings
from gateway.metrics import Metrics
from gateway.modes import Mode
from gateway.prompts import PromptEncoder
from gateway.sampling import check_sampling_ids, draw_seed, sampling_for
from gateway.schemas import GenerationRequest, StreamOptions
from gateway.tokenizer import Tokenizer
from gateway.validation import FieldRules, convert, known_fields, parse_object

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
    ) -> Call:
        """The call for these prompts, which share one seed. Raises ContextLengthError, InvalidFieldError."""
        seed = draw_seed(self.settings.default_seed) if request.seed is None else request.seed
        choices = [
            Choice(
                index,
                prompt,
                sampling_for(
                    request,
                    num_prompt=len(prompt),
                    max_model_len=max_model_len,
                    default_max_tokens=default_max_tokens,
                    seed=seed,
                    constraints=constraints,
                ),
                Traits(request.cache_salt or "", request.priority, mode),
            )
            for index, prompt in enumerate(prompts)
        ]
        return Call(
            shape=shape,
            model=self.check_model(request.model),
            choices=tuple(choices),
            rules=_text_rules(request),
            stream=(request.stream_options or StreamOptions()) if request.stream else None,
            started_at=started_at,
        )


async def read_request(scope: Scope, receive: Receive, request_type: type[_Request], rules: FieldRules) -> _Request:
    """The checked request in the body. Raises ApiError."""
    fields: Mapping[str, Any] = parse_object(await read_json_body(scope, receive))
    return convert(known_fields(fields, request_type, rules), request_type)


def _text_rules(request: GenerationRequest) -> TextRules:
    return TextRules(
        stops=request.stops,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.min_tokens,
    )
