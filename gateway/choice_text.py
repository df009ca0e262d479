"""One choice of an answer: from its tokens to its text, and how it ends.

Where log probabilities are asked for, each token goes out with the text that it begins in, or with the end:

    text      "The cat s|at"          stop string "sat"
    tokens    The, ·cat, ·sat         the last one begins before the cut and is shown; what begins behind is not
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.shown_text import ShownText, TextRules
from gateway.backend import TokenDelta
from gateway.echo import Echo
from gateway.tokenizer import Tokenizer
from kvtransfer.request_parts import EndReason, TokenLogprob


@dataclass(frozen=True)
class ChoiceRules(TextRules):
    """What of a choice is shown. `only_prompt`: nothing of the output is shown or counts."""

    only_prompt: bool = False


@dataclass(frozen=True)
class ShownToken:
    """A token of an answer with its log probability, which the first one of a prompt has not. `offset`: where it begins
    in the choice's text, characters."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int


@dataclass(frozen=True)
class TextDelta:
    """What one token adds to choice `index`. `text` may be empty; `finish_reason` is set on the last delta only
    ("stop" or "length"), which may have no token of its own. `tokens`, if log probabilities are asked for: those that
    are known to be shown by now. `prompt`, if asked for, on the first delta: the tokens of the prompt."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None
    tokens: tuple[ShownToken, ...] = ()
    prompt: tuple[ShownToken, ...] | None = None


class ChoiceText:
    """Takes the tokens of one choice and gives its text, piece by piece; the pieces joined are the whole text.

    What is shown of them is told by `ShownText`. Of the token that ends a choice (EOS, a stop token) and is not shown,
    the log probability is told all the same. With an `echo` the prompt comes first.
    """

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        rules: ChoiceRules,
        echo: Echo | None = None,
    ) -> None:
        self.is_finished = False
        self._index = index
        self._prompt = prompt_token_ids
        self._rules = rules
        self._echo = echo
        self._has_begun = False
        self._text = ShownText(
            lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip), prompt_token_ids, rules
        )
        self._num_prompt_chars = self._num_shown_chars = 0 if echo is None else len(echo.text)
        self._waiting: deque[ShownToken] = deque()  # not known to be shown yet

    def push(self, delta: TokenDelta) -> list[TextDelta]:
        """One TextDelta a token, fewer if a stop string ends the choice; one for the prompt before all of them, if
        there is anything to say of it."""
        deltas = [] if self._has_begun else self._opening(delta)
        self._has_begun = True
        if self._rules.only_prompt:
            self.is_finished = True
            return deltas
        num_shown = self._text.num_shown(delta.token_ids, delta.finish)
        for place, token_id in enumerate(delta.token_ids[:num_shown]):
            self._note(delta, place)
            deltas.append(self._delta(self._text.push(token_id), num_tokens=1))
            if self.is_finished:
                return deltas
        if delta.finish is not None:
            deltas.append(self._end(delta, delta.finish, num_shown))
        return deltas

    def _opening(self, delta: TokenDelta) -> list[TextDelta]:
        """What there is to say of the prompt: its text, and its tokens where somebody asks for them."""
        finish = "length" if self._rules.only_prompt else None
        scored = None if delta.prompt_logprobs is None else (None, *delta.prompt_logprobs)
        if self._echo is None and scored is None:
            return []
        offsets = () if self._echo is None else self._echo.offsets
        prompt = None if scored is None else self._prompt_tokens(scored, offsets or (0,) * len(scored))
        text = "" if self._echo is None else self._echo.text
        return [TextDelta(self._index, text, 0, finish, prompt or () if offsets else (), prompt)]

    def _prompt_tokens(self, scored: Sequence[TokenLogprob | None], offsets: Sequence[int]) -> tuple[ShownToken, ...]:
        return tuple(ShownToken(*parts) for parts in zip(self._prompt, scored, offsets, strict=True))

    def _note(self, delta: TokenDelta, place: int) -> None:
        """The token there begins where the text so far ends."""
        if delta.logprobs:
            offset = self._num_prompt_chars + self._text.next_offset
            self._waiting.append(ShownToken(delta.token_ids[place], delta.logprobs[place], offset))

    def _delta(self, text: str, num_tokens: int) -> TextDelta:
        self.is_finished = self._text.finish_reason is not None
        return TextDelta(self._index, text, num_tokens, self._text.finish_reason, self._shown(text))

    def _end(self, delta: TokenDelta, finish: EndReason, num_shown: int) -> TextDelta:
        """The last delta: what was still held back."""
        num_tokens = len(delta.token_ids) - num_shown
        text = self._text.end(finish, num_tokens)
        for place in range(num_shown, len(delta.token_ids)):
            self._note(delta, place)
        last = self._delta(text, num_tokens)
        return last if self._text.is_cut else replace(last, tokens=(*last.tokens, *self._waiting))

    def _shown(self, text: str) -> tuple[ShownToken, ...]:
        """The tokens that begin in what is shown, now that `text` is too."""
        self._num_shown_chars += len(text)
        tokens = []
        while self._waiting and self._waiting[0].offset < self._num_shown_chars:
            tokens.append(self._waiting.popleft())
        return tuple(tokens)
