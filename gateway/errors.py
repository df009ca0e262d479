"""Errors of the HTTP face, and how any error looks to a client.

ApiError                    has an HTTP status, OpenAI's error type, and possibly a field and a code
├── InvalidFieldError           400: a field or the JSON itself is wrong; `param` names the field
│   └── ContextLengthError      400: prompt and output do not fit the model; the message has both numbers
├── AuthenticationError         401
├── ForbiddenError              403: the key is known, and does not do for this
├── ModelNotFoundError          404
├── RouteNotFoundError          404
├── MethodNotAllowedError       405
├── BodyTimeoutError            408
├── BodyTooLargeError           413
├── MediaTypeError              415
├── ClientGoneError             499: the client left while its request was read; nobody sees this one
├── TooManyRequestsError        429
├── TooManyConnectionsError     503
├── SlowReaderError             429: the client reads its stream slower than tokens come
├── InternalError               500: a bug of ours; says nothing else
├── TextTimeoutError            503: rendering or tokenising took too long
└── UndecidedGrammarError       503: whoever examined a grammar was lost, which says nothing of the grammar

What the cluster raises is `gateway.backend.BackendError`; both have `status` and `kind`. Messages are fixed texts:
of what a client sent they hold names of fields and short excerpts at most, made safe by `excerpt`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.backend import BackendError

MAX_EXCERPT = 64
MAX_MESSAGE = 1024
RETRY_AFTER_S = 1


class ApiError(Exception):
    """Root; `str(error)` may be shown to a client."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidFieldError(ApiError):
    """A field is missing, unknown, of the wrong type or out of range, or the body is not JSON."""


class ContextLengthError(InvalidFieldError):
    """The request needs more tokens than the model has room for."""

    code = "context_length_exceeded"


class AuthenticationError(ApiError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(ApiError):
    """The key that was sent is not for this path."""

    status = 403
    kind = "permission_error"


class ModelNotFoundError(ApiError):
    """The model named is not served here."""

    status = 404
    kind = "not_found_error"
    code = "model_not_found"


class RouteNotFoundError(ApiError):
    """There is no such path."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(ApiError):
    """The path exists, but not for this method."""

    status = 405


class BodyTimeoutError(ApiError):
    """The body did not arrive in time."""

    status = 408


class BodyTooLargeError(ApiError):
    """The body has more bytes than this server takes."""

    status = 413


class MediaTypeError(ApiError):
    """The body is not declared as JSON."""

    status = 415


class ClientGoneError(ApiError):
    """The connection closed before the body was complete."""

    status = 499


class TooManyRequestsError(ApiError):
    """More requests at once than this server takes."""

    status = 429
    kind = "overloaded_error"


class TooManyConnectionsError(ApiError):
    """More connections at once than this server takes."""

    status = 503
    kind = "overloaded_error"


class SlowReaderError(ApiError):
    """More tokens wait for the client than may."""

    status = 429
    kind = "overloaded_error"


class InternalError(ApiError):
    """Stands for an exception that nobody expected."""

    status = 500
    kind = "server_error"

    def __init__(self) -> None:
        super().__init__("internal error")


class TextTimeoutError(ApiError):
    """Rendering, tokenising or detokenising took longer than allowed."""

    status = 503
    kind = "service_unavailable"


class UndecidedGrammarError(ApiError):
    """Nothing could be found of the request's grammar; it may be all right."""

    status = 503
    kind = "service_unavailable"


def excerpt(value: str) -> str:
    """At most MAX_EXCERPT characters of a client's text, printable ASCII only."""
    short = value if len(value) <= MAX_EXCERPT else value[:MAX_EXCERPT] + "..."
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in short)


def error_body(error: ApiError | BackendError) -> dict[str, Any]:
    """OpenAI's error object."""
    param, code = (error.param, error.code) if isinstance(error, ApiError) else (None, None)
    return {"error": {"message": str(error)[:MAX_MESSAGE], "type": error.kind, "param": param, "code": code}}


def error_headers(error: ApiError | BackendError) -> Mapping[str, str]:
    """Headers that belong to the error's status."""
    if error.status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S)}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {}
