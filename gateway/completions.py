"""`POST /v1/completions`."""

from collections.abc import Sequence
from typing import Final

from gateway.answers import CompletionShape
from gateway.asgi import Receive, Scope, Send
from gateway.echo import Echo
from gateway.errors import InvalidFieldError
from gateway.field_rules import COMPLETION_RULES
from gateway.generation import Call
from gateway.mode_header import asked_mode
from gateway.modes import Mode
from gateway.prompts import split_prompts, truncation
from gateway.schemas import CompletionRequest
from gateway.service import Service, read_request

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's, for completions that set no max_tokens."""


class CompletionsEndpoint:
    """An ASGI application. Choices of the answer are those of the first prompt, then those of the second, and so on."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = self._service.metrics.clock()
        mode = asked_mode(scope)
        request = await read_request(scope, receive, CompletionRequest, COMPLETION_RULES)
        call = await self._prepare(request, started_at, mode)
        await self._service.generation.answer(call, receive, send)

    async def _prepare(self, request: CompletionRequest, started_at: float, mode: Mode | None) -> Call:
        service = self._service
        service.check_model(request.model)
        service.check_generation(request)
        _check_fields(request)
        _check_best_of(request)
        prompts = split_prompts(request.prompt, service.settings.max_prompts)
        max_model_len = service.max_model_len(mode)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        num_kept = truncation(request.truncate_prompt_tokens, max_tokens, max_model_len)
        constraints = await service.constraints.check(request)
        encoded = await service.prompts.encode(
            prompts,
            add_special_tokens=request.add_special_tokens,
            max_model_len=max_model_len,
            num_kept=num_kept,
        )
        service.check_num_scores(request, encoded)
        echoes: Sequence[Echo | None] = [None] * len(encoded)
        if request.echo:
            is_told = request.num_logprobs is not None
            echoes = await service.prompts.echoes(
                prompts, encoded, truncated=num_kept is not None, with_offsets=is_told
            )
        return service.make_call(
            request,
            CompletionShape(service.logprob_style(request)),
            encoded,
            echoes=echoes,
            constraints=constraints,
            max_model_len=max_model_len,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            started_at=started_at,
            mode=mode,
        )


def _check_best_of(request: CompletionRequest) -> None:
    """Which choices are the best is known when all have ended."""
    if request.num_choices < request.n:
        raise InvalidFieldError(f"best_of: {request.best_of} is less than n, which is {request.n}", param="best_of")
    if request.is_ranked and request.stream:
        raise InvalidFieldError("best_of: more than n only without stream", param="best_of")
    if request.is_ranked and request.max_tokens == 0:
        raise InvalidFieldError("best_of: with max_tokens 0 there is no output to rank", param="best_of")


def _check_fields(request: CompletionRequest) -> None:
    if request.logprobs is True:
        raise InvalidFieldError("logprobs: must be the number of alternatives, not true", param="logprobs")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidFieldError("max_tokens: must be >= 1, or 0 with echo true", param="max_tokens")
