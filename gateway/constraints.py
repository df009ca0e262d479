"""Which tokens a request's output may have: checks its grammar, and turns its bad words into token ids.

Work on a client's text runs beside the event loop; grammars are compiled in processes that may be lost, see
`grammar.examiner`. What has been found of a grammar is kept, as the same one comes again and again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.errors import InvalidFieldError, UndecidedGrammarError
from gateway.schemas import GenerationRequest
from gateway.structured import AskedGrammar, asked_grammar
from gateway.text_pool import TextPool
from gateway.tokenizer import Tokenizer
from grammar.errors import GrammarError, UndecidedError
from grammar.examiner import Examiners, Outfit
from kvtransfer.request_parts import MAX_BAD_SEQUENCE_TOKENS, MAX_GRAMMAR_CHARS, Grammar, GrammarKind

NUM_EXAMINERS: Final = 2
MAX_KEPT_CHARS: Final = 8 << 20
"""Of the grammars whose verdicts are kept."""
MAX_KEPT_VERDICTS: Final = 4096
"""Short grammars cost more than their characters."""


@dataclass(frozen=True)
class Constraints:
    """As `SamplingParams` has them."""

    grammar: Grammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


class ConstraintCheck:
    """Makes constraints of requests."""

    def __init__(self, tokenizer: Tokenizer, texts: TextPool, timeout_s: float) -> None:
        """`timeout_s`: how long a request may wait for its grammar's turn and verdict."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._compiling = TextPool(NUM_EXAMINERS, timeout_s)
        self._examiners = Examiners(NUM_EXAMINERS, self._outfit)
        self._verdicts = Verdicts()

    async def check(self, request: GenerationRequest) -> Constraints:
        """Raises InvalidFieldError, TextTimeoutError, UndecidedGrammarError."""
        asked = asked_grammar(request)
        grammar = None if asked is None else await self._grammar(asked)
        if not request.bad_words:
            return Constraints(grammar)
        bad = await self._texts.run(lambda: bad_sequences(request.bad_words, self._tokenizer))
        return Constraints(grammar, bad)

    def close(self) -> None:
        """Ends the processes."""
        self._compiling.close()
        self._examiners.close()

    async def _grammar(self, asked: AskedGrammar) -> Grammar:
        name = (asked.kind, asked.text)
        verdict = self._verdicts.get(name)
        if verdict is None:
            verdict = await self._compiling.run(lambda: self._examine(asked))
            if isinstance(verdict, UndecidedError):
                raise UndecidedGrammarError(f"{asked.field}: {verdict}")
            self._verdicts.put(name, verdict)
        if isinstance(verdict, GrammarError):
            raise InvalidFieldError(f"{asked.field}: {verdict}", param=asked.field)
        return verdict

    def _examine(self, asked: AskedGrammar) -> Grammar | GrammarError:
        try:
            return self._examiners.examine(Grammar(asked.kind, asked.text, self._tokenizer.vocabulary_digest))
        except GrammarError as error:
            return error

    def _outfit(self) -> Outfit:
        """Which token ends an output is the workers' affair; here any will do."""
        return Outfit(self._tokenizer.to_json(), self._tokenizer.num_ids, (self._tokenizer.num_ids - 1,))


class Verdicts:
    """What was found of the grammars that were used last."""

    def __init__(self, max_chars: int = MAX_KEPT_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._found: OrderedDict[tuple[GrammarKind, str], Grammar | GrammarError] = OrderedDict()

    def get(self, name: tuple[GrammarKind, str]) -> Grammar | GrammarError | None:
        if name not in self._found:
            return None
        self._found.move_to_end(name)
        return self._found[name]

    def put(self, name: tuple[GrammarKind, str], verdict: Grammar | GrammarError) -> None:
        if name not in self._found:
            self._num_chars += len(name[1])
        self._found[name] = verdict
        while self._num_chars > max(self._max_chars, MAX_GRAMMAR_CHARS) or len(self._found) > MAX_KEPT_VERDICTS:
            self._num_chars -= len(self._found.popitem(last=False)[0][1])


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, at the beginning of a text and behind a blank. Raises InvalidFieldError."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids or len(ids) > MAX_BAD_SEQUENCE_TOKENS:
                raise InvalidFieldError(
                    f"bad_words[{index}]: has {len(ids)} tokens, 1 to {MAX_BAD_SEQUENCE_TOKENS} are allowed",
                    param="bad_words",
                )
            found[ids] = None
    return tuple(found)
