"""A client of any OpenAI-compatible server: streamed completions, with the time of every chunk."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from experiments.stream_record import Outcome, StreamRecord

Prompt = str | Sequence[int]

_DONE: Final = "[DONE]"
_MAX_FAILURE_CHARS: Final = 200
_CONNECT_SECONDS: Final = 10.0


class ServerError(Exception):
    """The server does not do what is asked; the message says what it answered."""


class StreamClient:
    """`ignore_eos`: ask for exactly as many tokens as wanted, with vLLM's field of that name. `fields`: of each call,
    beside the usual ones."""

    def __init__(
        self, http: httpx.AsyncClient, model: str, *, ignore_eos: bool, fields: Mapping[str, Any] | None = None
    ) -> None:
        self._http = http
        self._model = model
        self._more = {**({"ignore_eos": True} if ignore_eos else {}), **(fields or {})}

    @property
    def http(self) -> httpx.AsyncClient:
        return self._http

    @property
    def model(self) -> str:
        return self._model

    async def stream(self, prompt: Prompt, max_tokens: int, stop_at: float, due: float | None = None) -> StreamRecord:
        """One completion, from its call to its end or until `stop_at`. Failures are recorded, not raised."""
        sent_at = time.monotonic()
        watch = _Watch()
        try:
            async with asyncio.timeout(stop_at - sent_at):
                await self._follow(self._body(prompt, max_tokens), watch)
        except TimeoutError:
            watch.outcome = Outcome.CUT
        except (httpx.HTTPError, ServerError, msgspec.MsgspecError) as error:
            watch.failure = f"{type(error).__name__}: {error}"[:_MAX_FAILURE_CHARS]
        return watch.record(sent_at, late_by=0.0 if due is None else max(0.0, sent_at - due))

    async def prompt_tokens(self, prompt: Prompt) -> int:
        """The server's own count of a prompt's tokens. Raises ServerError, or httpx.HTTPError."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        response = await self._http.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerError(f"/v1/completions answers {response.status_code}: {response.text[:_MAX_FAILURE_CHARS]}")
        return int(response.json()["usage"]["prompt_tokens"])

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }

    async def _follow(self, body: dict[str, Any], watch: "_Watch") -> None:
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ServerError(f"HTTP {response.status_code}: {text}")
            async for data in events_of(response):
                watch.take(data, time.monotonic())


def open_client(url: str, api_key: str | None) -> httpx.AsyncClient:
    """Connections without a limit, so that none waits for another's; reads are bounded by the caller."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)


async def first_model(http: httpx.AsyncClient) -> str:
    """The name of the first model that the server offers. Raises ServerError, or httpx.HTTPError."""
    response = await http.get("/v1/models", timeout=_CONNECT_SECONDS)
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"/v1/models answers {response.status_code}")
    return str(response.json()["data"][0]["id"])


class _Watch:
    """A stream as it comes in: a failure until the server has said that it is done."""

    def __init__(self) -> None:
        self.outcome = Outcome.FAILED
        self.failure = "the stream broke off before [DONE]"
        self._chunk_times: list[float] = []
        self._usage: dict[str, int] = {}

    def take(self, data: str, now: float) -> None:
        """One event. Raises ServerError if the server reports one."""
        if data == _DONE:
            self.outcome = Outcome.FINISHED
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            raise ServerError(f"error in the stream: {event['error']}")
        if any(choice.get("text") for choice in event.get("choices", ())):
            self._chunk_times.append(now)
        self._usage = event.get("usage") or self._usage

    def record(self, sent_at: float, late_by: float) -> StreamRecord:
        return StreamRecord(
            sent_at=sent_at,
            ended_at=time.monotonic(),
            outcome=self.outcome,
            chunk_times=tuple(self._chunk_times),
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            late_by=late_by,
            failure=self.failure if self.outcome is Outcome.FAILED else "",
        )


async def events_of(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event; comments and empty lines are none."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()
