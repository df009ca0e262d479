"""Prompts that no cache has seen: random words, anew for each, of a wanted length in tokens.

If the server has `/tokenize`, the ids of many random words are learnt once, and a prompt is that many ids drawn from
them: exact. Otherwise a prompt is text, as long as the server's count for a first one makes likely; what it came out as
is in the usage of every answer.
"""

import random
from collections.abc import Sequence
from typing import Final, Protocol

import httpx

from experiments.stream_client import Prompt, StreamClient

NUM_WORDS: Final = 2000
"""Drawn from for ids and for the count of tokens a word."""
_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"
_TOKENIZE_SECONDS: Final = 30.0


class PromptSource(Protocol):
    """Makes a new prompt of about or exactly `num_tokens` tokens. Takes no time that would disturb a measurement."""

    is_exact: bool

    def take(self, num_tokens: int) -> Prompt: ...


class IdPrompts:
    """Prompts as token ids."""

    is_exact = True

    def __init__(self, ids: Sequence[int], dice: random.Random) -> None:
        self._ids = ids
        self._dice = dice

    def take(self, num_tokens: int) -> list[int]:
        return self._dice.choices(self._ids, k=num_tokens)


class TextPrompts:
    """Prompts as text."""

    is_exact = False

    def __init__(self, tokens_per_word: float, dice: random.Random) -> None:
        self._tokens_per_word = tokens_per_word
        self._dice = dice

    def take(self, num_tokens: int) -> str:
        return random_text(self._dice, max(1, round(num_tokens / self._tokens_per_word)))


def random_text(dice: random.Random, num_words: int) -> str:
    return " ".join(_word(dice) for _ in range(num_words))


def _word(dice: random.Random) -> str:
    return "".join(dice.choice(_CONSONANTS) + dice.choice(_VOWELS) for _ in range(dice.randint(1, 3)))


async def prompt_source(client: StreamClient, dice: random.Random, sample_words: int) -> PromptSource:
    """What this server can do. Without /tokenize, a prompt of `sample_words` words is counted by the server. Raises
    ServerError, or httpx.HTTPError."""
    body = {"model": client.model, "prompt": random_text(dice, NUM_WORDS), "add_special_tokens": False}
    response = await client.http.post("/tokenize", json=body, timeout=_TOKENIZE_SECONDS)
    if response.status_code == httpx.codes.OK:
        return IdPrompts([int(token) for token in response.json()["tokens"]], dice)
    counted = await client.prompt_tokens(random_text(dice, sample_words))
    return TextPrompts(counted / sample_words, dice)
