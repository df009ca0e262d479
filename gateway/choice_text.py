"""One choice of an answer: from its tokens to its text, and how it ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.stops import StopScanner
from gateway.backend import TokenDelta
from gateway.tokenizer import Tokenizer
from kvtransfer.messages import EndReason


@dataclass(frozen=True)
class TextRules:
    """What of the tokens is shown. Stop strings count from token number `min_tokens` on."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


@dataclass(frozen=True)
class TextDelta:
    """What one token adds to choice `index`. `text` may be empty; `finish_reason` is set on the last delta only
    ("stop" or "length"), which may have no token of its own."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None


class ChoiceText:
    """Takes the tokens of one choice and gives its text, piece by piece; the pieces joined are the whole text.

    The token that ends a choice (EOS, a stop token) is the last one of a delta that finishes with STOP. It counts, but
    is not shown, unless the rules include stops. After a stop string nothing more counts.
    """

    def __init__(self, index: int, prompt_token_ids: Sequence[int], tokenizer: Tokenizer, rules: TextRules) -> None:
        self.is_finished = False
        self._index = index
        self._rules = rules
        self._num_tokens = 0
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._detokenizer = Detokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=rules.skip_special_tokens), prompt_token_ids
        )

    def push(self, delta: TokenDelta) -> list[TextDelta]:
        """One TextDelta a token, fewer if a stop string ends the choice."""
        deltas: list[TextDelta] = []
        num_shown = len(delta.token_ids) - self._hides_last(delta)
        for token_id in delta.token_ids[:num_shown]:
            text = self._scan(self._detokenizer.push(token_id), self._num_tokens + 1)
            deltas.append(self._delta(text, num_tokens=1))
            if self.is_finished:
                return deltas
        if delta.finish is not None:
            deltas.append(self._end(delta.finish, num_tokens=len(delta.token_ids) - num_shown))
        return deltas

    def _hides_last(self, delta: TokenDelta) -> bool:
        return delta.finish is EndReason.STOP and bool(delta.token_ids) and not self._rules.include_stop

    def _scan(self, piece: str, number: int) -> str:
        """`piece` is the text of output token `number`, counted from 1."""
        return self._scanner.push(piece) if number >= self._rules.min_tokens else piece

    def _delta(self, text: str, num_tokens: int) -> TextDelta:
        self._num_tokens += num_tokens
        self.is_finished = self._scanner.is_hit
        return TextDelta(self._index, text, num_tokens, "stop" if self.is_finished else None)

    def _end(self, finish: EndReason, num_tokens: int) -> TextDelta:
        """The last delta: what the detokenizer and the scanner still hold. That may complete a stop string."""
        text = self._scan(self._detokenizer.finish(), self._num_tokens + num_tokens) + self._scanner.flush()
        is_stop = finish is EndReason.STOP or self._scanner.is_hit
        self.is_finished = True
        return TextDelta(self._index, text, num_tokens, "stop" if is_stop else "length")
