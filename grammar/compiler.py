"""From a grammar to a matcher, which knows after each token what may come next."""

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from llguidance import LLMatcher, LLParserLimits

from grammar.errors import CostError, GrammarError, reason_of
from grammar.source import source_of
from grammar.vocabulary import Vocabulary
from kvtransfer.request_parts import Grammar

LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "initial_lexer_fuel": 1_000_000,  # about 20 ms
        "step_lexer_fuel": 100_000,  # about 7 ms of one mask
        "step_max_items": 25_000,  # about 1 ms of one mask
        "max_items_in_row": 2_000,
        "max_lexer_states": 20_000,  # 1 to 2 kB each
        "max_grammar_size": 200_000,
    }
)
"""Bounds on what one grammar may cost, in the library's own units."""
_COST_WORDS: Final = ("too many", "too complex", "limit", "max is", "too large", "too big")


def compile_grammar(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    """A matcher at its beginning. Raises GrammarError.

    Takes milliseconds as a rule; LIMITS do not bound all that there is, so see `grammar.examiner`.
    """
    matcher = LLMatcher(vocabulary.tokens, source_of(grammar), log_level=0, limits=limits_of(LIMITS))
    # Some errors show only in the first mask, or in the first token.
    mask = matcher.compute_bitmask()
    probe = matcher.deep_copy()
    if not matcher.is_error():
        probe.consume_token(_first_token(mask, vocabulary))
    if fault := fault_of(probe):
        raise fault
    return matcher


def fault_of(matcher: LLMatcher) -> GrammarError | None:
    """What has ended the matcher before its time, if anything has."""
    said = matcher.get_error()
    if not said:
        return None
    if said.startswith("NoExtension"):
        return GrammarError("no output matches it")
    kind = CostError if any(word in said.lower() for word in _COST_WORDS) else GrammarError
    return kind(reason_of(said))


def limits_of(limits: Mapping[str, int]) -> LLParserLimits:
    """The library's own struct; errors say nothing of its inner state, as clients see them."""
    return LLParserLimits(verbose_errors=False, **limits)  # type: ignore[arg-type]  # all that is left are integers


def _first_token(mask: bytes, vocabulary: Vocabulary) -> int:
    """The first token that `mask` allows, an end token if there is no other."""
    ends = set(vocabulary.eos_token_ids)
    allowed = (8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
    return next((token_id for token_id in allowed if token_id not in ends), vocabulary.eos_token_ids[0])


class MatcherCache:
    """Matchers of the grammars that were used last; `get` gives copies. For one thread at a time."""

    def __init__(self, max_grammars: int) -> None:
        self._max_grammars = max_grammars
        self._matchers: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def __len__(self) -> int:
        return len(self._matchers)

    def __contains__(self, grammar: Grammar) -> bool:
        return (grammar.kind.value, grammar.text) in self._matchers

    def get(self, grammar: Grammar) -> LLMatcher | None:
        """A matcher at its beginning that is the caller's own."""
        name = (grammar.kind.value, grammar.text)
        found = self._matchers.get(name)
        if found is None:
            return None
        self._matchers.move_to_end(name)
        return found.deep_copy()

    def put(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Keeps a copy of `matcher`, which must be at its beginning."""
        self._matchers[grammar.kind.value, grammar.text] = matcher.deep_copy()
        while len(self._matchers) > self._max_grammars:
            self._matchers.popitem(last=False)
