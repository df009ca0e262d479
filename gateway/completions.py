"""`POST /v1/completions`."""

from typing import Final

from gateway.answers import CompletionShape
from gateway.asgi import Receive, Scope, Send
from gateway.generation import Call
from gateway.mode_header import asked_mode
from gateway.modes import Mode
from gateway.prompts import split_prompts
from gateway.schemas import COMPLETION_RULES, CompletionRequest
from gateway.service import Service, read_request

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's, for completions that set no max_tokens."""


class CompletionsEndpoint:
    """An ASGI application. Each prompt of the request is one choice of the answer."""

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
        prompts = split_prompts(request.prompt, service.settings.max_prompts)
        max_model_len = service.max_model_len(mode)
        constraints = await service.constraints.check(request)
        encoded = await service.prompts.encode(
            prompts, add_special_tokens=request.add_special_tokens, max_model_len=max_model_len
        )
        return service.make_call(
            request,
            CompletionShape(),
            encoded,
            constraints=constraints,
            max_model_len=max_model_len,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            started_at=started_at,
            mode=mode,
        )
