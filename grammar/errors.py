"""Exceptions of grammars.

GrammarError            a grammar can't be served; `str(error)` is safe to show a client
├── CostError           it may be right, but takes more work or memory than one request may cost
└── UndecidedError      what was to be found of it has not been; another time it may be: no verdict
"""

import re
from typing import Final

MAX_REASON_CHARS: Final = 200
_REASON_BELOW: Final = "error: "
_QUOTED_EXPRESSION: Final = re.compile(r'(invalid regex) "(?:[^"\\]|\\.)*+" \(in regex\)')
"""An expression of any length, between which and its place stands what is wrong with it."""


class GrammarError(Exception):
    """The grammar is wrong, matches nothing, or does not fit the model."""


class CostError(GrammarError):
    """Compiling the grammar or following it takes too much."""


class UndecidedError(GrammarError):
    """Whoever examined the grammar was lost, by no limit of its own."""


def reason_of(text: str) -> str:
    """What the library says is wrong, on one line: it may quote the client, so printable ASCII and not much of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("<")]
    first = _QUOTED_EXPRESSION.sub(r"\1", lines[0]) if lines else "no reason given"
    # Of an expression the library draws where it goes wrong, and says below the drawing what is wrong.
    told = [line.removeprefix(_REASON_BELOW) for line in lines[1:] if line.startswith(_REASON_BELOW)]
    reason = f"{first.removesuffix(':')}: {told[-1]}" if told else first
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in reason[:MAX_REASON_CHARS])
