"""The gateway's HTTP application: routes, and one boundary at which errors become answers.

    POST /v1/completions  /v1/chat/completions  /tokenize  /detokenize  /reset_prefix_cache
    GET  /v1/models  /v1/models/{name}  /version  /health  /metrics  /openapi.json
    for operators, where admin calls are on:  GET /admin/workers  POST /admin/workers/{worker_id}/role

/health and /metrics need no key. The application knows a `Backend` and nothing of workers. POST endpoints that take a
body are ASGI applications that read and check it themselves: FastAPI's coercions (true for 1, "7" for 7, unknown fields
dropped) are not for an API whose users must be told what they got wrong.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin_calls import admin_routes
from gateway.administration import Administration
from gateway.asgi import AsgiApp
from gateway.backend import Backend, BackendError
from gateway.chat import ChatEndpoint
from gateway.completions import CompletionsEndpoint
from gateway.constraints import ConstraintCheck
from gateway.errors import (
    ApiError,
    InternalError,
    MethodNotAllowedError,
    RouteNotFoundError,
    error_body,
    error_headers,
)
from gateway.generation import Generation
from gateway.limits import HttpSettings, guarded
from gateway.metrics import Metrics
from gateway.mode_header import only_mode
from gateway.openapi import describe
from gateway.prompts import PromptEncoder
from gateway.service import Service
from gateway.text_pool import TextPool
from gateway.token_texts import TokenTexts
from gateway.tokenization import DetokenizeEndpoint, TokenizeEndpoint
from gateway.tokenizer import Tokenizer

TEXT_THREADS: Final = 4

Handler = Callable[[Request], Awaitable[Response]]
Respond = Callable[[Service, Request], Awaitable[Response]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    settings: HttpSettings,
    metrics: Metrics,
    admin: Administration | None = None,
) -> AsgiApp:
    """The whole HTTP face as one ASGI application, guards included. Without `admin` there are no paths for it."""
    pool = TextPool(TEXT_THREADS, settings.text_timeout_s)
    constraints = ConstraintCheck(tokenizer, pool, settings.text_timeout_s)
    service = Service(
        backend=backend,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        prompts=PromptEncoder(tokenizer, pool),
        constraints=constraints,
        generation=Generation(backend, tokenizer, settings, metrics, pool),
        token_texts=TokenTexts(tokenizer),
        created=int(time.time()),
    )
    routes = [*_post_routes(service, pool), *([] if admin is None else admin_routes(admin))]
    app = _application(service, routes, _closing(pool, constraints))
    app.openapi = partial(describe, app, with_admin=admin is not None)  # type: ignore[method-assign]  # FastAPI's documented way
    return guarded(app, settings, metrics.count_http_answer)


def _closing(*parts: TextPool | ConstraintCheck) -> Lifespan:
    """Ends the threads and processes of `parts` with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for part in parts:
            part.close()

    return lifespan


def _application(service: Service, routes: list[BaseRoute], lifespan: Lifespan) -> FastAPI:
    app = FastAPI(
        title="kvsplice",
        description="OpenAI-style completions, prefilled and decoded on different GPUs.",
        version=service.settings.version,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        routes=routes,
        exception_handlers={
            HTTPException: _on_http_exception,
            ApiError: _on_error,
            BackendError: _on_error,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    _add_simple_routes(app, service)
    return app


def _post_routes(service: Service, pool: TextPool) -> list[BaseRoute]:
    return [
        Route("/v1/completions", CompletionsEndpoint(service), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(service), methods=["POST"]),
        Route("/tokenize", TokenizeEndpoint(service), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(service, pool), methods=["POST"]),
    ]


def _add_simple_routes(app: FastAPI, service: Service) -> None:
    """Each handler is called with the service and the request; FastAPI describes it by its docstring."""
    handlers: dict[tuple[str, str], Respond] = {
        ("GET", "/v1/models"): _list_models,
        ("GET", "/v1/models/{name:path}"): _show_model,
        ("GET", "/version"): _version,
        ("GET", "/health"): _health,
        ("GET", "/metrics"): _metrics,
        ("POST", "/reset_prefix_cache"): _reset_prefix_cache,
    }
    for (method, path), respond in handlers.items():
        app.add_api_route(
            path, _bound(respond, service), methods=[method], name=respond.__name__, description=respond.__doc__
        )


def _bound(respond: Respond, service: Service) -> Handler:
    async def handler(request: Request) -> Response:
        return await respond(service, request)

    return handler


async def _list_models(service: Service, request: Request) -> Response:
    """The names that requests may use."""
    return _json({"object": "list", "data": [_model(service, name) for name in service.settings.served_model_names]})


async def _show_model(service: Service, request: Request) -> Response:
    """One of them; 404 if it is not served."""
    return _json(_model(service, service.check_model(request.path_params["name"])))


async def _version(service: Service, request: Request) -> Response:
    """This release."""
    return _json({"version": service.settings.version})


async def _health(service: Service, request: Request) -> Response:
    """200 only when a request sent now could be served; with ?mode=..., one that asks for this mode."""
    status = service.backend.status(only_mode(request.query_params.getlist("mode"), "mode"))
    if status.ready:
        return _json({"status": "ready"})
    return _json({"status": "unavailable", "reasons": list(status.reasons)}, status=503)


async def _metrics(service: Service, request: Request) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _reset_prefix_cache(service: Service, request: Request) -> Response:
    """From now on no request is served from KV that earlier ones have left behind."""
    service.backend.reset_prefix_cache()
    return Response()


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvsplice",
        "max_model_len": service.backend.status().max_model_len,
    }


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {type(error).__name__}"
    if error.status_code == 405:
        response = _error(MethodNotAllowedError("this path does not take this method"))
    else:
        response = _error(RouteNotFoundError("there is no such path"))
    response.headers.update(error.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | BackendError), f"registered for our errors, got {type(error).__name__}"
    return _error(error)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the exception again behind this answer, so that the server logs it."""
    return _error(InternalError())


def _error(error: ApiError | BackendError) -> Response:
    return _json(error_body(error), status=error.status, headers=dict(error_headers(error)))


def _json(content: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
