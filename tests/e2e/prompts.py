"""Prompts of the equality proof: several languages and scripts, code, numbers, emoji, and lengths from 1 to 3,000."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LONG_PROMPT_TOKENS = 3000


class Encodes(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """A named text to continue, and how many new tokens to ask for."""

    name: str
    text: str
    max_tokens: int = 16


PROMPTS: Sequence[Prompt] = (
    Prompt("one word", "Hello"),
    Prompt("english fact", "The capital of France is"),
    Prompt("english story", "The lighthouse keeper had not spoken to anyone for eleven days when a boat", 24),
    Prompt("list", "Shopping list:\n- flour\n- butter\n- eggs\n-"),
    Prompt("german", "Der Zug nach Hamburg fährt heute leider später ab, weil"),
    Prompt("french", "Au petit matin, la boulangère ouvre sa porte et"),
    Prompt("spanish", "Las montañas estaban cubiertas de nieve cuando llegamos al"),
    Prompt("polish", "Źdźbło trawy kołysało się na wietrze, a żółw"),
    Prompt("russian", "Утром над рекой стоял густой туман, и"),
    Prompt("greek", "Η θάλασσα ήταν ήρεμη και το καράβι"),
    Prompt("arabic", "في الصباح الباكر خرج الصياد إلى"),
    Prompt("chinese", "春天来了，花园里的"),
    Prompt("japanese", "駅前の小さな本屋で、"),
    Prompt("emoji", "Weather today: ☀️🌤️🌧️ Mood: 🙂🙃 Tomorrow: "),
    Prompt("python", 'def mean(values):\n    """The arithmetic mean."""\n    return', 24),
    Prompt("json", '{"name": "pump-7", "state": "running", "pressure_bar": 4.2, "alarms": ['),
    Prompt("arithmetic", "12 + 30 = 42\n7 * 8 = 56\n91 - 19 ="),
    Prompt("shell", "$ ls -l /var/log | sort -k5 -n | tail -3\n"),
    Prompt("whitespace", "a\t\tb\n\n\n   c  \r\n d"),
)
"""Nineteen texts; the twentieth is `long_prompt`, made as token ids."""


def long_prompt(tokenizer: Encodes, num_tokens: int = LONG_PROMPT_TOKENS) -> list[int]:
    """Exactly `num_tokens` ids of a ship's log, each line different, so that a lost or shifted chunk shows."""
    winds, seas = ("north", "east", "south", "west"), ("calm", "slight", "rough")
    lines = (
        f"Day {day}: wind {winds[day * 7 % 4]} at {day * 13 % 41} knots, sea {seas[day * 5 % 3]}, "
        f"{day * 17 % 97} miles made good, {300 - day} litres of water left.\n"
        for day in range(5, 300)
    )
    token_ids = tokenizer.encode("".join(lines), add_special_tokens=False)
    assert len(token_ids) >= num_tokens, len(token_ids)
    return token_ids[:num_tokens]
