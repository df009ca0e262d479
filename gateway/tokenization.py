"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from gateway.asgi import Receive, Scope, Send, send_json
from gateway.errors import InvalidFieldError
from gateway.field_rules import DETOKENIZE_RULES, TOKENIZE_RULES
from gateway.prompts import check_token_ids
from gateway.schemas import DetokenizeRequest, TokenizeRequest
from gateway.service import Service, read_request
from gateway.text_pool import TextPool


class TokenizeEndpoint:
    """An ASGI application. Prompts of any length; `max_model_len` is null while there are no workers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(scope, receive, TokenizeRequest, TOKENIZE_RULES)
        self._service.check_model(request.model)
        (tokens,) = await self._encode(request)
        max_model_len = self._service.backend.status().max_model_len
        await send_json(send, {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens})

    async def _encode(self, request: TokenizeRequest) -> tuple[tuple[int, ...], ...]:
        prompts = self._service.prompts
        if (request.prompt is None) == (request.messages is None):
            raise InvalidFieldError("send either prompt or messages", param="prompt")
        if request.messages is None:
            text, default = request.prompt or "", True
        else:
            text, default = await self._render(request), False
        add_special_tokens = default if request.add_special_tokens is None else request.add_special_tokens
        return await prompts.encode([text], add_special_tokens=add_special_tokens, max_model_len=None)

    async def _render(self, request: TokenizeRequest) -> str:
        return await self._service.prompts.render(
            request.messages or (),
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )


class DetokenizeEndpoint:
    """An ASGI application."""

    def __init__(self, service: Service, pool: TextPool) -> None:
        self._service = service
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(scope, receive, DetokenizeRequest, DETOKENIZE_RULES)
        self._service.check_model(request.model)
        tokenizer = self._service.tokenizer
        check_token_ids("tokens", request.tokens, tokenizer.num_ids)
        text = await self._pool.run(lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))
        await send_json(send, {"prompt": text})
