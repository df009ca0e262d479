"""Bounds of what may be asked of a generation, over HTTP and by a program of one's own alike, where they are not those
of the messages to workers. Knows no torch."""

from typing import Annotated, Final

import msgspec

from kvtransfer.request_parts import MAX_TOKEN_ID

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 512

Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKEN_ID)]
"""0 and -1: off."""
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
