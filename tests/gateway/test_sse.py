"""Events as they go over the wire."""

import json

import pytest

from gateway.sse import EventStream


async def sent(item) -> str:
    chunks = []

    async def send(message) -> None:
        chunks.append(message["body"])

    await EventStream(send).write([item])
    return b"".join(chunks).decode()


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["a\x85b", "\u2028", "\u2029\u2028", "\n\r", "\x0b\x0c\x1c\x1d\x1e", "héllo 👍"])
async def test_an_event_is_one_line_however_a_client_splits_lines(text):
    event = await sent({"text": text})
    line, empty = event.splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
