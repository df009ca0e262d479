"""A client of the tests: sends one completion call and records all that comes back, with the times."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.cluster import MODEL_NAME

DONE = "[DONE]"


@dataclass
class Answer:
    """A completion as the client saw it. Times are seconds since the call was sent."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    pieces: list[str] = field(default_factory=list)  # streamed texts, one a chunk
    times: list[float] = field(default_factory=list)
    num_done: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        assert self.usage is not None, self
        return int(self.usage["completion_tokens"])


def body_of(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """The JSON of a greedy completion call; `fields` add to it or change it."""
    return {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}


def complete(http: httpx.Client, prompt: str | list[int], **fields: Any) -> Answer:
    """One call without streaming; fails unless it is answered with 200."""
    response = http.post("/v1/completions", json=body_of(prompt, **fields))
    assert response.status_code == 200, response.text
    payload = response.json()
    (choice,) = payload["choices"]
    return Answer(choice["text"], choice["finish_reason"], payload["usage"])


def stream(http: httpx.Client, prompt: str | list[int], **fields: Any) -> Answer:
    """One streaming call, read to its end."""
    answer = Answer()
    start = time.monotonic()
    body = body_of(prompt, stream=True, stream_options={"include_usage": True}, **fields)
    with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()}")
        for data in events(response):
            _take(answer, data, time.monotonic() - start)
    return answer


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _take(answer: Answer, data: str, at: float) -> None:
    if data == DONE:
        answer.num_done += 1
        return
    payload = json.loads(data)
    if "error" in payload:
        answer.errors.append(payload["error"])
        return
    answer.usage = payload.get("usage") or answer.usage
    for choice in payload["choices"]:
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if choice["text"]:
            answer.text += choice["text"]
            answer.pieces.append(choice["text"])
            answer.times.append(at)
