"""One choice of an answer: from its tokens to its text, and how it ends.

Where log probabilities are asked for, each token goes out with the text that it begins in, or with the end:

    text      "The cat s|at"          stop string "sat"
    tokens    The, ·cat, ·sat         the last one begins before the cut and is shown; what begins behind is not
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.stops import StopScanner
from gateway.backend import TokenDelta
from gateway.echo import Echo
from gateway.tokenizer import Tokenizer
from kvtransfer.messages import EndReason, TokenLogprob


@dataclass(frozen=True)
class TextRules:
    """What of the tokens is shown. Stop strings count from token number `min_tokens` on. `only_prompt`: nothing of the
    output is shown or counts."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
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

    The token that ends a choice (EOS, a stop token) is the last one of a delta that finishes with STOP. It counts, and
    its log probability is told, but it is not in the text, unless the rules include stops. After a stop string nothing
    more counts. With an `echo` the prompt comes first.
    """

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        rules: TextRules,
        echo: Echo | None = None,
    ) -> None:
        self.is_finished = False
        self._index = index
        self._prompt = prompt_token_ids
        self._rules = rules
        self._echo = echo
        self._has_begun = False
        self._num_tokens = 0
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._detokenizer = Detokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=rules.skip_special_tokens), prompt_token_ids
        )
        self._num_chars = self._num_shown_chars = 0 if echo is None else len(echo.text)
        self._waiting: deque[ShownToken] = deque()  # not known to be shown yet

    def push(self, delta: TokenDelta) -> list[TextDelta]:
        """One TextDelta a token, fewer if a stop string ends the choice; one for the prompt before all of them, if
        there is anything to say of it."""
        deltas = [] if self._has_begun else self._opening(delta)
        self._has_begun = True
        if self._rules.only_prompt:
            self.is_finished = True
            return deltas
        num_shown = len(delta.token_ids) - self._hides_last(delta)
        for place, token_id in enumerate(delta.token_ids[:num_shown]):
            self._note(delta, place, self._num_chars + self._detokenizer.num_pending_chars)
            text = self._scan(self._detokenizer.push(token_id), self._num_tokens + 1)
            deltas.append(self._delta(text, num_tokens=1))
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

    def _hides_last(self, delta: TokenDelta) -> bool:
        return delta.finish is EndReason.STOP and bool(delta.token_ids) and not self._rules.include_stop

    def _note(self, delta: TokenDelta, place: int, offset: int) -> None:
        if delta.logprobs:
            self._waiting.append(ShownToken(delta.token_ids[place], delta.logprobs[place], offset))

    def _scan(self, piece: str, number: int) -> str:
        """`piece` is the text of output token `number`, counted from 1."""
        self._num_chars += len(piece)
        return self._scanner.push(piece) if number >= self._rules.min_tokens else piece

    def _delta(self, text: str, num_tokens: int) -> TextDelta:
        self._num_tokens += num_tokens
        self.is_finished = self._scanner.is_hit
        return TextDelta(self._index, text, num_tokens, "stop" if self.is_finished else None, self._shown(text))

    def _end(self, delta: TokenDelta, finish: EndReason, num_shown: int) -> TextDelta:
        """The last delta: what the detokenizer and the scanner still hold. That may complete a stop string."""
        num_tokens = len(delta.token_ids) - num_shown
        text = self._scan(self._detokenizer.finish(), self._num_tokens + num_tokens) + self._scanner.flush()
        is_stop = finish is EndReason.STOP or self._scanner.is_hit
        self.is_finished = True
        for place in range(num_shown, len(delta.token_ids)):
            self._note(delta, place, self._num_chars)
        tokens = self._shown(text)
        if not self._scanner.is_hit:
            tokens += tuple(self._waiting)
        return TextDelta(self._index, text, num_tokens, "stop" if is_stop else "length", tokens)

    def _shown(self, text: str) -> tuple[ShownToken, ...]:
        """The tokens that begin in what is shown, now that `text` is too."""
        self._num_shown_chars += len(text)
        tokens = []
        while self._waiting and self._waiting[0].offset < self._num_shown_chars:
            tokens.append(self._waiting.popleft())
        return tuple(tokens)
