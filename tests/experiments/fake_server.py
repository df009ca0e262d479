"""An OpenAI-compatible server that says the same word again and again, at a steady pace."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

GONE = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
"""The client has hung up, or the test is over."""


@dataclass
class FakeServer:
    """Runs in a thread of its own. `gap` seconds lie before each chunk; `status` other than 200 refuses completions."""

    gap: float = 0.005
    has_tokenize: bool = True
    status: int = 200
    breaks_after: int | None = None  # chunks, then the connection just closes
    error_after: int | None = None  # chunks, then an error event
    metrics: Sequence[str] = ()  # what /metrics says, one call after another; there is none if empty
    bodies: list = field(default_factory=list)
    num_scrapes: int = 0

    @contextlib.contextmanager
    def running(self):
        loop, ready = asyncio.new_event_loop(), threading.Event()
        thread = threading.Thread(target=self._run, args=(loop, ready), daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    def _run(self, loop, ready) -> None:
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        loop.run_forever()
        server.close()
        loop.run_until_complete(self._end_connections())

    @staticmethod
    async def _end_connections() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports close in a later turn of the loop

    async def _serve(self, reader, writer) -> None:
        with contextlib.closing(writer), contextlib.suppress(*GONE):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length) or b"null")
            await self._answer(head.split(" ")[1], body, writer)

    async def _answer(self, path, body, writer) -> None:
        if path == "/v1/models":
            self._write(writer, 200, {"data": [{"id": "fake"}]})
        elif path == "/tokenize":
            tokens = list(range(len(body["prompt"].split())))
            self._write(writer, 200 if self.has_tokenize else 404, {"tokens": tokens})
        elif path == "/metrics":
            text = self.metrics[self.num_scrapes] if self.metrics else ""
            self.num_scrapes += 1
            self._write_bytes(writer, 200 if self.metrics else 404, text.encode())
        elif not body.get("stream"):
            self._write(writer, self.status, {"usage": {"prompt_tokens": count(body["prompt"])}})
        else:
            self.bodies.append(body)
            await self._stream(body, writer)

    async def _stream(self, body, writer) -> None:
        if self.status != 200:
            self._write(writer, self.status, {"error": "no"})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n: hello\n\n")
        writer.write(event({"choices": [{"text": ""}]}))
        for number in range(body["max_tokens"]):
            await asyncio.sleep(self.gap)
            if number == self.breaks_after:
                return
            if number == self.error_after:
                writer.write(event({"error": {"message": "out of luck"}}))
                return
            writer.write(event({"choices": [{"text": "word "}]}))
            await writer.drain()
        usage = {"prompt_tokens": count(body["prompt"]), "completion_tokens": body["max_tokens"]}
        writer.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await writer.drain()

    @staticmethod
    def _write(writer, status, payload) -> None:
        FakeServer._write_bytes(writer, status, json.dumps(payload).encode())

    @staticmethod
    def _write_bytes(writer, status, data) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)


def event(payload) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def count(prompt) -> int:
    """Two tokens a word, or the ids themselves."""
    return 2 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)
