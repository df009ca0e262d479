"""What stands before the application, as raw ASGI: bounds, keys and ids, settled before a body is read.

    request --> AnswerCount --> RequestIds --> KeyGuard --> Admission --> BodyGuard --> application
                                               401, 403       429          413, 408

Paths are compared as the server hands them over (`scope["path"]`), never through a URL object, and everything that is
not in OPEN_PATHS needs the key; what is under /admin/ needs the admin key instead, if there is one.
"""

import asyncio
import hmac
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.asgi import AsgiApp, Message, Receive, Scope, Send, send_error
from gateway.errors import (
    ApiError,
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    ForbiddenError,
    TooManyRequestsError,
)
from kvtransfer.errors import SettingsError

OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
"""Open without a key and never turned away: load balancers and scrapers need them, and they tell nothing of clients."""

ADMIN_PREFIX: Final = "/admin/"
"""What is below is for operators. It is never turned away either: who wants to act on an overload must get through."""

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
_DIGITS: Final = re.compile(rb"[0-9]{1,19}")


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Names and bounds of the HTTP face. Times in seconds.

    `served_model_names`: the first stands in answers that do not quote the request's. `stream_buffer_tokens`: per
    call. `max_prompts`: prompts in one completion call. `sse_comment_s`: silence after which a stream gets a comment.
    `request_timeout_s`: for a call that takes many requests on the workers, each of which has the same bound there;
    `failover_timeout_s`: such a call waits so long for workers between two of them.
    """

    served_model_names: tuple[str, ...]
    version: str
    api_key: str | None = None
    admin_key: str | None = None
    default_seed: int | None = None
    max_body_bytes: int = 8 << 20
    max_connections: int = 512
    max_concurrent_requests: int = 256
    max_prompts: int = 128
    stream_buffer_tokens: int = 4096
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    sse_comment_s: float = 15.0
    text_timeout_s: float = 30.0
    shutdown_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    failover_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise SettingsError("the served model needs a name that is not empty")
        if "" in (self.api_key, self.admin_key):
            raise SettingsError("the API key and the admin key must not be empty")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name.startswith(("max_", "stream_")) and value < 1:
                raise SettingsError(f"{name} must be at least 1, not {value}")
            if name.endswith("_s") and value < 0:
                raise SettingsError(f"{name} must not be negative, but is {value}")


def guarded(app: AsgiApp, settings: HttpSettings, count: Callable[[int], None]) -> AsgiApp:
    """The application behind all guards; `count` is told the status of each answer."""
    bounded = BodyGuard(app, settings.max_body_bytes, settings.body_timeout_s)
    admitted = Admission(bounded, settings.max_concurrent_requests)
    return AnswerCount(RequestIds(KeyGuard(admitted, settings.api_key, settings.admin_key)), count)


class AnswerCount:
    """Passes everything on, and says the status of each answer to `count`."""

    def __init__(self, app: AsgiApp, count: Callable[[int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
            await send(message)

        await self._app(scope, receive, counting)


class RequestIds:
    """Echoes X-Request-Id if it is printable ASCII of at most 128 characters, else answers with a fresh one.

    It is for the client's own logs: nothing in here is named by it.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        return await self._app(scope, receive, send_with_id)


class KeyGuard:
    """Lets a request pass if its path is open or it brings the path's key as `Authorization: Bearer KEY`."""

    def __init__(self, app: AsgiApp, api_key: str | None, admin_key: str | None = None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._admin_key = None if admin_key is None else admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._fault_of(scope)):
            return await send_error(send, error)
        return await self._app(scope, receive, send)

    def _fault_of(self, scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN_PATHS:
            return None
        if scope["path"].startswith(ADMIN_PREFIX) and self._admin_key is not None:
            return self._fault_of_admin(scope, self._admin_key)
        if self._api_key is None or _brings(scope, self._api_key):
            return None
        return AuthenticationError("send the API key as 'Authorization: Bearer KEY'")

    def _fault_of_admin(self, scope: Scope, admin_key: bytes) -> ApiError | None:
        if _brings(scope, admin_key):
            return None
        if self._api_key is not None and _brings(scope, self._api_key):
            return ForbiddenError("the API key does not do for this; send the admin key")
        return AuthenticationError("send the admin key as 'Authorization: Bearer KEY'")


class Admission:
    """At most `limit` requests at once; the rest gets 429 without waiting."""

    def __init__(self, app: AsgiApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self.num_admitted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_free = scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(ADMIN_PREFIX)
        if is_free:
            return await self._app(scope, receive, send)
        if self.num_admitted >= self._limit:
            error = TooManyRequestsError(f"{self._limit} requests are in work, which is the limit; try again later")
            return await send_error(send, error)
        self.num_admitted += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self.num_admitted -= 1


class BodyGuard:
    """Counts the body's bytes as they come, whatever the headers say, and gives them a time limit.

    A declared length over the bound is refused before anything is read. Over it later, or too slow, `receive` raises
    the ApiError, for the application to answer with.
    """

    def __init__(self, app: AsgiApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if error := self._fault_of_length(scope):
            return await send_error(send, error)
        body = BoundedBody(receive, self._max_bytes, self._timeout_s)
        return await self._app(scope, body.receive, send)

    def _fault_of_length(self, scope: Scope) -> ApiError | None:
        for value in _header_values(scope, b"content-length"):
            if _DIGITS.fullmatch(value) is None or int(value) > self._max_bytes:
                return _too_large(self._max_bytes)
        return None


class BoundedBody:
    """One request's `receive`, with a bound on bytes and a deadline for the last of them."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._num_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """The next message. Raises BodyTooLargeError, BodyTimeoutError."""
        if self._is_complete:  # from here on it is the wait for a disconnect, which may be long
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeoutError("the body of the request did not arrive in time") from None
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body of the request may have at most {max_bytes} bytes")


def _brings(scope: Scope, expected: bytes) -> bool:
    """Whether a request has this key, and no other beside it."""
    values = _header_values(scope, b"authorization")
    if len(values) != 1:
        return False
    scheme, _, key = values[0].partition(b" ")
    return hmac.compare_digest(key.strip(), expected) and scheme.lower() == b"bearer"


def _header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _request_id(scope: Scope) -> bytes:
    values = _header_values(scope, b"x-request-id")
    if len(values) == 1 and _REQUEST_ID.fullmatch(values[0]):
        return values[0]
    return uuid.uuid4().hex.encode()
