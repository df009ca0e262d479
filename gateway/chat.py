"""`POST /v1/chat/completions`."""

from gateway.answers import ChatShape
from gateway.asgi import Receive, Scope, Send
from gateway.errors import InvalidFieldError
from gateway.field_rules import CHAT_RULES
from gateway.generation import Call
from gateway.mode_header import asked_mode
from gateway.modes import Mode
from gateway.prompts import truncation
from gateway.schemas import ChatRequest
from gateway.service import Service, read_request


class ChatEndpoint:
    """An ASGI application. Without max_tokens an answer may take what the model has room for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = self._service.metrics.clock()
        mode = asked_mode(scope)
        request = await read_request(scope, receive, ChatRequest, CHAT_RULES)
        call = await self._prepare(request, started_at, mode)
        await self._service.generation.answer(call, receive, send)

    async def _prepare(self, request: ChatRequest, started_at: float, mode: Mode | None) -> Call:
        service = self._service
        service.check_model(request.model)
        service.check_generation(request)
        _check_max_tokens(request)
        if request.top_logprobs and not request.logprobs:
            raise InvalidFieldError("top_logprobs: only with logprobs true", param="top_logprobs")
        text = await service.prompts.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )
        max_model_len = service.max_model_len(mode)
        constraints = await service.constraints.check(request)
        encoded = await service.prompts.encode(
            [text],
            add_special_tokens=request.add_special_tokens,
            max_model_len=max_model_len,
            num_kept=truncation(request.truncate_prompt_tokens, request.asked_max_tokens, max_model_len),
        )
        service.check_num_scores(request, encoded)
        return service.make_call(
            request,
            ChatShape(service.logprob_style(request)),
            encoded,
            constraints=constraints,
            max_model_len=max_model_len,
            default_max_tokens=max_model_len,
            started_at=started_at,
            mode=mode,
        )


def _check_max_tokens(request: ChatRequest) -> None:
    """`max_completion_tokens` is the newer name of `max_tokens`."""
    asked = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise InvalidFieldError(
            "max_completion_tokens: contradicts max_tokens, its older name; send one", param="max_completion_tokens"
        )
