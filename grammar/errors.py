"""Exceptions of grammars.

GrammarError            a grammar can't be served; `str(error)` is safe to show a client
└── CostError           it may be right, but takes more work or memory than one request may cost
"""

from typing import Final

MAX_REASON_CHARS: Final = 200


class GrammarError(Exception):
    """The grammar is wrong, matches nothing, or does not fit the model."""


class CostError(GrammarError):
    """Compiling the grammar or following it takes too much."""


def reason_of(text: str) -> str:
    """The first line of what the library says: it may quote the client, so printable ASCII and not much of it."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("<")]
    first = lines[0].strip() if lines else "no reason given"
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in first[:MAX_REASON_CHARS])
