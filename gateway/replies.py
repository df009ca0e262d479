"""JSON answers and error answers as ASGI messages."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from gateway.backend import BackendError
from gateway.errors import ApiError, error_body, error_headers

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def send_json(
    send: Send, content: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """One complete answer."""
    body = msgspec.json.encode(content)
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError | BackendError) -> None:
    """One complete answer in the shape of OpenAI's errors."""
    await send_json(send, error_body(error), status=error.status, headers=error_headers(error))
