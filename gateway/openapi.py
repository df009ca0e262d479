"""The OpenAPI description at /openapi.json: FastAPI's own of the GET routes, and the POST routes' request types.

Request bodies are msgspec types, stricter than what FastAPI would parse: FastAPI can't see them by itself.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REQUEST_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }
)


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `app`, with the request body of each POST path."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas, components = msgspec.json.schema_components(
        REQUEST_TYPES.values(), ref_template="#/components/schemas/{name}"
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, schema in zip(REQUEST_TYPES, schemas, strict=True):
        document["paths"][path] = {"post": _operation(path, schema)}
    return document


def _operation(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer; server-sent events if `stream` is true."},
            "4XX": {"description": 'The request\'s fault: {"error": {"message", "type", "param", "code"}}.'},
            "5XX": {"description": "Ours, in the same shape."},
        },
    }
