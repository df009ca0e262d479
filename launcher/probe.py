"""The launcher as a client of its own gateway: is it ready, and what does one completion look like."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

from launcher.errors import LaunchError
from launcher.health import ask

SAMPLE_TIMEOUT_S: Final = 60.0
SAMPLE_QUESTION: Final = "What is the capital of France?"
SAMPLE_BEGINNING: Final = "The capital of France is"
SAMPLE_TOKENS: Final = 32


@dataclass(frozen=True)
class GatewayProbe:
    """Where the gateway is and how to ask it: a question to a model that can `chat`, else a text to go on with.
    `workers`: ids of all that it should have."""

    host: str
    port: int
    model: str
    api_key: str | None
    chat: bool
    workers: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def prompt(self) -> str:
        return SAMPLE_QUESTION if self.chat else SAMPLE_BEGINNING

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def curl_line(self) -> str:
        """A streaming call to paste into a shell. The key is named, not shown."""
        key = ' -H "Authorization: Bearer $KVSPLICE_API_KEY"' if self.api_key else ""
        body = json.dumps(self._body()).replace("'", "'\\''")
        return f"curl -N {self.url}{self.path} -H 'Content-Type: application/json'{key} -d '{body}'"

    def health(self) -> tuple[bool, str]:
        """Whether a request could be served now, by any of the workers; and if not, why."""
        for worker_id in (None, *self.workers):
            healthy, reason = ask(self.url, worker_id)
            if not healthy:
                return False, reason
        return True, "ready"

    def sample(self) -> Iterator[str]:
        """Pieces of one streamed completion. Raises LaunchError if the gateway does not give it."""
        connection = HTTPConnection(self.host, self.port, timeout=SAMPLE_TIMEOUT_S)
        try:
            connection.request("POST", self.path, json.dumps(self._body()), self._headers())
            response = connection.getresponse()
            if response.status != 200:
                raise LaunchError(f"HTTP {response.status}: {response.read(500).decode('utf-8', 'replace')}")
            for line in response:
                yield from _texts(line)
        except (OSError, HTTPException, ValueError) as error:
            raise LaunchError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def _body(self) -> Mapping[str, Any]:
        text = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return {"model": self.model, **text, "max_tokens": SAMPLE_TOKENS, "temperature": 0, "stream": True}


def has_chat_template(checkpoint: Path) -> bool:
    """Whether the checkpoint in this folder says how to put a chat into a prompt."""
    if (checkpoint / "chat_template.jinja").is_file():
        return True
    config = checkpoint / "tokenizer_config.json"
    return config.is_file() and "chat_template" in json.loads(config.read_bytes())


def _texts(line: bytes) -> Iterator[str]:
    """Texts in one line of a server-sent event stream."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return
    event = json.loads(line[len(b"data:") :])
    if "error" in event:
        raise LaunchError(str(event["error"].get("message")))
    for choice in event["choices"]:
        yield choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
