"""ASGI in types, and whole answers as ASGI messages."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from gateway.backend import BackendError
from gateway.errors import ApiError, ClientGoneError, MediaTypeError, error_body, error_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


async def read_json_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body of a request that says it is JSON; bounds are the business of `gateway.limits`.

    Other types are refused: a page in a browser may post text/plain to any server without asking it first, JSON not.
    Raises MediaTypeError, ClientGoneError.
    """
    types = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    if len(types) != 1 or types[0].split(b";")[0].strip().lower() != b"application/json":
        raise MediaTypeError("send the header 'Content-Type: application/json'")
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Status and headers of an answer."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_json(
    send: Send, content: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """One complete answer."""
    body = msgspec.json.encode(content)
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    await send_start(send, status, fields)
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError | BackendError) -> None:
    """One complete answer in the shape of OpenAI's errors."""
    await send_json(send, error_body(error), status=error.status, headers=error_headers(error))
