"""The OpenAPI description at /openapi.json: FastAPI's own of the GET routes, and the POST routes' request types.

Request bodies are msgspec types, stricter than what FastAPI would parse: FastAPI can't see them by itself.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.admin_calls import SWITCH_PATH, WORKERS_PATH, SwitchRoleRequest
from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REQUEST_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }
)


def describe(app: FastAPI, *, with_admin: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `app`, with the request body of each POST path. `with_admin`: it answers those of
    operators too."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    types = {**REQUEST_TYPES, **({SWITCH_PATH: SwitchRoleRequest} if with_admin else {})}
    schemas, components = msgspec.json.schema_components(types.values(), ref_template="#/components/schemas/{name}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, schema in zip(types, schemas, strict=True):
        document["paths"][path] = {"post": _operation(path, schema)}
    if with_admin:
        listing = {"description": "The live workers.", "content": {"application/json": {}}}
        document["paths"][WORKERS_PATH] = {"get": {"operationId": "admin_workers", "responses": {"200": listing}}}
    return document


def _operation(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", path)
    return {
        "operationId": re.sub(r"\W+", "_", path).strip("_"),
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer; server-sent events if `stream` is true."},
            "4XX": {"description": 'The request\'s fault: {"error": {"message", "type", "param", "code"}}.'},
            "5XX": {"description": "Ours, in the same shape."},
        },
    }
