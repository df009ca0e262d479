"""Server-sent events in OpenAI's shape: one JSON object an event, `[DONE]` behind the last, and none after an error.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.asgi import Send, send_start

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"

_LINE_ENDS: Final = {
    character.encode(): f"\\u{ord(character):04x}".encode() for character in ("\x85", "\u2028", "\u2029")
}
"""Not line ends to the standard, but to many a client that splits lines as Python does; JSON may escape them."""

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class EventStream:
    """The body of one streamed answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def start(self, more_headers: Mapping[str, str]) -> None:
        self.is_started = True
        await send_start(self._send, 200, {**HEADERS, **more_headers})

    async def write(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """One event an object, in one piece."""
        if objects:
            await self._write(b"".join(_event(item) for item in objects))

    async def write_comment(self) -> None:
        """Keeps the connection alive while there is nothing to say; clients skip it."""
        await self._write(COMMENT)

    async def finish(self) -> None:
        """The regular end."""
        await self._write(DONE, more=False)

    async def fail(self, body: Mapping[str, Any]) -> None:
        """The end after an error."""
        await self._write(_event(body), more=False)

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _event(item: Mapping[str, Any]) -> bytes:
    data = msgspec.json.encode(item)
    for character, escaped in _LINE_ENDS.items():
        data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"
