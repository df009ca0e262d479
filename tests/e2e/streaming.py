"""A stream that a test reads in the background while it kills, stops and starts processes."""

import json
import threading
import time

import httpx

from tests.e2e.client import DONE, body_of, events
from tests.e2e.cluster import Cluster

NOTICED_WITHIN_S = 3.0
"""A crash must be known at the gateway this soon."""
PROMPT = [10, 11, 12, 13, 14]
ENDLESS = {"max_tokens": 12000, "ignore_eos": True}


class Streaming:
    """One stream, endless unless `fields` say otherwise, read in a thread of its own up to its end."""

    def __init__(self, cluster: Cluster, **fields) -> None:
        self.cluster = cluster
        self.ended_at: float | None = None
        self.status: int | None = None
        self.was_cut = False  # the connection broke before the response was complete
        self.has_begun = threading.Event()
        fields = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **ENDLESS, **fields}
        self._body = body_of(**fields)
        self._events: list[str] = []
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            self._read_events()
        except httpx.TransportError:
            self.was_cut = True
        self.ended_at = time.monotonic()

    def _read_events(self) -> None:
        with self.cluster.http.stream("POST", "/v1/completions", json=self._body) as response:
            self.status = response.status_code
            for data in events(response):
                self._events.append(data)
                if len(self._events) >= 3:
                    self.has_begun.set()

    def __enter__(self) -> "Streaming":
        self._thread.start()
        assert self.has_begun.wait(10.0), f"the stream has not begun, status {self.status}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join(30.0)
        assert not self._thread.is_alive(), "the stream has not ended"

    @property
    def text(self) -> str:
        return "".join(choice["text"] for data in self._json_events() for choice in data.get("choices", ()))

    @property
    def num_tokens(self) -> int:
        """By the usage at the end of the stream."""
        (usage,) = (data["usage"] for data in self._json_events() if data.get("usage"))
        return int(usage["completion_tokens"])

    def _json_events(self) -> list[dict]:
        return [json.loads(data) for data in self._events if data != DONE]

    @property
    def errors(self) -> list[str]:
        return [data for data in self._events if data.startswith('{"error"')]

    @property
    def num_done(self) -> int:
        return self._events.count(DONE)
