"""A gateway without workers: a tokenizer made on the spot, a scripted backend, and an HTTP client on the app."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gateway.app import create_app
from gateway.backend import ClusterStatus, TokenDelta, Traits, UnavailableError
from gateway.gathering import Gathering
from gateway.limits import HttpSettings
from gateway.metrics import Metrics
from gateway.modes import Mode
from gateway.tokenizer import Tokenizer
from kvtransfer.request_parts import EndReason, SamplingParams

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "hello world hello there",
    "stop the stopping of stops",
    "x" * 8,
)
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('an assistant can not begin') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level_bpe() -> RawTokenizer:
    """Every byte is a token, so that characters beyond ASCII span several."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


NUM_IDS = byte_level_bpe().get_vocab_size()


@cache
def tokenizer_of_world() -> Tokenizer:
    hf = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), bos_token="<s>", eos_token="<|im_end|>")
    hf.chat_template = CHAT_TEMPLATE
    return Tokenizer(hf)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer_of_world().encode(text, add_special_tokens=False))


Step = TokenDelta | Exception | float
"""What a scripted request does next: say tokens, fail, or sleep for so many seconds."""


def saying(text: str, finish: EndReason = EndReason.STOP) -> list[Step]:
    """One token a delta. A text that ends with STOP has the end-of-turn token behind it, as workers send it."""
    ids = ids_of(text)
    if finish is EndReason.STOP:
        ids += ids_of("<|im_end|>")
    return [*(TokenDelta((token,), None) for token in ids[:-1]), TokenDelta(ids[-1:], finish)]


@dataclass
class ScriptedBackend:
    """Answers each request with the steps that `script` gives for its prompt; remembers what was asked and closed."""

    script: Callable[[tuple[int, ...], SamplingParams], Sequence[Step]] = lambda prompt, sampling: saying("hello world")
    max_model_len: int = 100
    reasons: tuple[str, ...] = ()
    calls: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    traits: list[Traits] = field(default_factory=list)
    num_resets: int = 0
    goes: Mode | None = None  # where it says that requests go
    impossible: tuple[Mode, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    num_open: int = 0
    num_cut: int = 0

    def status(self, mode: Mode | None = None) -> ClusterStatus:
        ready = not self.reasons and mode not in self.impossible
        return ClusterStatus(ready, self.reasons, self.max_model_len if ready else None, self.eos_token_ids)

    def reset_prefix_cache(self) -> None:
        if self.reasons:
            raise UnavailableError("a worker could not be told")
        self.num_resets += 1

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        traits: Traits,
        *,
        arrived_at: float,
        note_mode: Callable[[Mode], None] | None = None,
        gathering: Gathering[Any] | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        prompt = tuple(prompt_token_ids)
        self.calls.append((prompt, sampling))
        self.traits.append(traits)
        self.arrivals.append(arrived_at)
        if self.goes is not None and note_mode is not None:
            note_mode(self.goes)
        self.num_open += 1
        is_whole = False
        try:
            for step in self.script(prompt, sampling):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    raise step
                else:
                    is_whole = step.finish is not None
                    yield step
        finally:
            self.num_open -= 1
            self.num_cut += not is_whole


@dataclass
class World:
    """The application with its parts. `ask` runs one request to its end."""

    backend: ScriptedBackend
    settings: HttpSettings
    metrics: Metrics
    app: Any

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def ask(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(send())

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.ask("POST", path, json=body, **kwargs)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})


def make_world(backend: ScriptedBackend | None = None, **settings: Any) -> World:
    backend = backend or ScriptedBackend()
    made = HttpSettings(served_model_names=("tiny", "org/tiny"), version="1.2.3", **settings)
    metrics = Metrics()
    return World(backend, made, metrics, create_app(backend, tokenizer_of_world(), made, metrics))


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON objects of an event stream, with "[DONE]" as it is."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), response.text
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any], index: int = 0) -> str:
    """The joined text of one choice."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)
