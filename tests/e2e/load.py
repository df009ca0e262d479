"""Calls with known answers: what an undisturbed server says to each, and how a call under faults has ended."""

import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx

from tests.e2e.client import DONE, body_of, complete, events
from tests.tiny_models import VOCAB_SIZE, make_tokenizer

FIRST_TEXT_ID = 5
"""Below are the tiny model's special tokens."""


class OutcomeKind(Enum):
    """How a call has ended at its client."""

    RIGHT = "right"  # the undisturbed answer, complete
    REFUSED = "refused"  # 503 at the door, at once: no worker of some role could take it
    ERROR = "error"  # one error, and before it nothing but the beginning of the undisturbed answer
    CUT = "cut"  # the connection broke: the gateway is gone. What came before is a beginning, too
    HUNG = "hung"  # nothing came for the client's patience
    WRONG = "wrong"  # anything else


@functools.cache
def legible() -> Mapping[str, float]:
    """A bias against all tokens but printable ASCII: then a text shows its tokens, which broken bytes don't."""
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)]
    return {
        str(token_id): -100.0
        for token_id, text in enumerate(texts)
        if token_id < FIRST_TEXT_ID or not (text.isascii() and text.isprintable())
    }


@dataclass(frozen=True)
class Call:
    """A completion call; its tokens depend neither on streaming nor on where the prompt is computed (`mode`)."""

    prompt: tuple[int, ...]
    max_tokens: int
    is_streamed: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "auto"

    @property
    def headers(self) -> dict[str, str]:
        return {"X-KVSplice-Mode": self.mode}

    @property
    def fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "ignore_eos": True, "logit_bias": legible(), **self.sampling}


@dataclass(frozen=True)
class Outcome:
    """`seconds`: from the call to its end. `detail` says what an error or a wrong answer was."""

    kind: OutcomeKind
    seconds: float
    detail: str = ""


def random_call(rng: random.Random, *, max_prompt: int, max_tokens: int) -> Call:
    """Any length up to the bounds, short ones more often; half of them sampled with a seed, most of them streamed."""
    prompt = random_prompt(rng, skewed(rng, max_prompt))
    sampling: dict[str, Any] = {"temperature": 0}
    if rng.random() < 0.5:
        sampling = {"temperature": rng.choice((0.5, 0.8, 1.0)), "top_p": 0.95, "seed": rng.randrange(1 << 30)}
    return Call(prompt, 1 + skewed(rng, max_tokens - 1), rng.random() < 0.8, sampling)


def random_prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TEXT_ID, VOCAB_SIZE) for _ in range(num_tokens))


def skewed(rng: random.Random, most: int) -> int:
    """1 to `most`, half of the values in the lowest quarter."""
    return 1 + int((most - 1) * rng.random() ** 2)


def solo_answers(http: httpx.Client, calls: Sequence[Call]) -> list[str]:
    """The text of each call, one after the other with nothing beside them."""
    return [complete(http, list(call.prompt), **call.fields).text for call in calls]


def play(http: httpx.Client, call: Call, expected: str) -> Outcome:
    """Makes the call and compares all that comes with `expected`."""
    start = time.monotonic()
    listener = _Listener(expected)
    try:
        (listener.stream if call.is_streamed else listener.ask)(http, call)
        kind, detail = listener.verdict()
    except httpx.TimeoutException as error:
        kind, detail = OutcomeKind.HUNG, type(error).__name__
    except httpx.TransportError as error:
        kind = OutcomeKind.CUT if listener.is_beginning else OutcomeKind.WRONG
        detail = f"{type(error).__name__} behind {listener.text[-40:]!r}"
    return Outcome(kind, time.monotonic() - start, detail)


class _Listener:
    """What one call was told."""

    def __init__(self, expected: str) -> None:
        self._expected = expected
        self.text = ""
        self._errors: list[str] = []
        self._is_refused = False
        self._num_done = 0

    @property
    def is_beginning(self) -> bool:
        return self._expected.startswith(self.text)

    def stream(self, http: httpx.Client, call: Call) -> None:
        body = body_of(list(call.prompt), stream=True, **call.fields)
        with http.stream("POST", "/v1/completions", json=body, headers=call.headers) as response:
            if response.status_code != 200:
                self._take_refusal(response.status_code, response.read())
                return
            for data in events(response):
                self._take_event(data)

    def ask(self, http: httpx.Client, call: Call) -> None:
        body = body_of(list(call.prompt), **call.fields)
        response = http.post("/v1/completions", json=body, headers=call.headers)
        if response.status_code != 200:
            self._take_refusal(response.status_code, response.content)
            return
        self.text = response.json()["choices"][0]["text"]
        self._num_done = 1

    def _take_refusal(self, status: int, content: bytes) -> None:
        error = json.loads(content)["error"]
        self._errors.append(f"{status}: {error['message']}")
        self._is_refused = status == 503 and "worker can take requests" in error["message"]

    def _take_event(self, data: str) -> None:
        if data == DONE:
            self._num_done += 1
            return
        payload = json.loads(data)
        if "error" in payload:
            self._errors.append(payload["error"]["message"])
            return
        self.text += "".join(choice["text"] for choice in payload["choices"])

    def verdict(self) -> tuple[OutcomeKind, str]:
        if (self._num_done, self._errors, self.text) == (1, [], self._expected):
            return OutcomeKind.RIGHT, ""
        if self._num_done == 0 and len(self._errors) == 1 and self.is_beginning:
            return OutcomeKind.REFUSED if self._is_refused else OutcomeKind.ERROR, self._errors[0]
        return OutcomeKind.WRONG, f"{self._num_done} ends, errors {self._errors}, text {self.text!r}"


@contextmanager
def concurrently(http: httpx.Client, calls: Sequence[Call], answers: Sequence[str]) -> Iterator[list[Future[Outcome]]]:
    """All calls at once, each in a thread of its own; left when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(play, http, call, answer) for call, answer in zip(calls, answers, strict=True)]


def green_probes(probe: Callable[[], Outcome], count: int, within_s: float) -> float:
    """Seconds until `count` probes in a row were right; fails the test after `within_s`."""
    start = time.monotonic()
    in_a_row, last = 0, None
    while in_a_row < count:
        assert time.monotonic() - start < within_s, f"not recovered within {within_s:g} s: {last}"
        last = probe()
        assert last.kind is not OutcomeKind.WRONG, last
        in_a_row = in_a_row + 1 if last.kind is OutcomeKind.RIGHT else 0
        if in_a_row == 0:
            time.sleep(0.05)
    return time.monotonic() - start
