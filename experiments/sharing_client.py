"""Completions of one or several choices, with the times of each choice's first tokens."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from experiments.stream_client import ServerError, events_of

OUTPUT_TOKENS: Final = 8
"""The first is prefill's, the others need the hand-over. Some may have no text."""
REQUEST_SECONDS: Final = 300.0
_MAX_TEXT: Final = 200


@dataclass(frozen=True)
class Shared:
    """One call as the client saw it, seconds since it was sent. `ttft`: to the first text of any choice; `all_second`:
    until each choice has its second piece of text. `cached`: prompt tokens that the server found in its cache."""

    ttft: float
    all_second: float
    cached: int


class SharingClient:
    """Asks one server in one mode."""

    def __init__(self, http: httpx.AsyncClient, model: str, mode: str) -> None:
        self._http = http
        self._model = model
        self._headers = {"X-KVSplice-Mode": mode}

    async def ask(self, prompt: Sequence[int], choices: int = 1) -> Shared:
        """Streams one call to its end. Raises ServerError, httpx.HTTPError, TimeoutError."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": OUTPUT_TOKENS,
            "seed": 1,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"n": choices} if choices > 1 else {}),
        }
        times: dict[int, list[float]] = {index: [] for index in range(choices)}
        usage: dict[str, Any] = {}
        sent_at = time.monotonic()
        async with asyncio.timeout(REQUEST_SECONDS):
            async with self._http.stream("POST", "/v1/completions", json=body, headers=self._headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise ServerError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:_MAX_TEXT]}")
                async for data in events_of(response):
                    usage = _take(data, time.monotonic() - sent_at, times) or usage
        return _shared(times, usage)


def _take(data: str, at: float, times: dict[int, list[float]]) -> dict[str, Any] | None:
    """Notes when choices had text; the usage, if the event has it."""
    if data == "[DONE]":
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise ServerError(f"error in the stream: {event['error']}")
    for choice in event["choices"]:
        if choice["text"]:
            times[choice["index"]].append(at)
    usage: dict[str, Any] | None = event.get("usage")
    return usage


def _shared(times: dict[int, list[float]], usage: dict[str, Any]) -> Shared:
    if any(len(each) < 2 for each in times.values()):
        raise ServerError(f"a choice has less than two pieces of text: {[len(each) for each in times.values()]}")
    details = usage.get("prompt_tokens_details") or {}
    return Shared(
        ttft=min(each[0] for each in times.values()),
        all_second=max(each[1] for each in times.values()),
        cached=details.get("cached_tokens", 0),
    )
