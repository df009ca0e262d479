"""How messages cross a process: what they are made of, and their encoding.

msgpack, one message a frame. A struct is a map with a `type` tag; unknown fields, wrong types and values out of range
are refused while decoding, so what a handler receives is already within these bounds.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from kvtransfer.errors import MessageError

PROTOCOL_VERSION = 7

MAX_CONTROL_BYTES = 16 << 20
"""Upper bound of a control frame, bytes. A prompt of a million token ids takes about 5 MB."""
MAX_TEXT_CHARS = 2048
MAX_ERROR_CHARS = 256
"""Upper bound of what a `MessageError` says: it may quote the sender, and it goes into a log."""

NAME_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}\Z"
"""A name is also a ZeroMQ routing id (at most 255 bytes) and goes into logs, so: ASCII, no spaces, no line ends."""

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Endpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 53))]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
RequestKey = tuple[str, int]
"""(request_id, attempt): names one hand-over."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """Base of all messages; the tag is the class name."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what messages are made of."""


_Incoming = TypeVar("_Incoming")


def encode(message: Message) -> bytes:
    """One message as one msgpack frame."""
    return msgspec.msgpack.encode(message)


class Decoder(Generic[_Incoming]):
    """Decodes frames into one direction's messages; anything else is a `MessageError`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Incoming] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> _Incoming:
        if len(frame) > MAX_CONTROL_BYTES:
            raise MessageError(f"frame of {len(frame)} bytes, at most {MAX_CONTROL_BYTES} are allowed")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"malformed message: {str(error)[:MAX_ERROR_CHARS]!r}") from error

    def or_error(self, frames: Sequence[bytes | memoryview]) -> _Incoming | MessageError:
        """The message in `frames`, which must be one frame, or what is wrong with it."""
        if len(frames) != 1:
            return MessageError(f"{len(frames)} frames, this message is one")
        try:
            return self(frames[0])
        except MessageError as error:
            return error
