"""Grammars that nobody wrote in good faith: each gets a verdict, and whatever passes can be followed or ends with a
reason. Nothing raises anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar.compiler import compile_grammar, fault_of
from grammar.errors import GrammarError
from grammar.examiner import Examiner, Outfit
from kvtransfer.request_parts import GrammarKind
from tests.fuzz.hostile import QUICK
from tests.grammar.made_grammars import BAD, GOOD, grammar, tokenizer_json, vocabulary
from tests.tiny_models import EOS_ID, VOCAB_SIZE

SEEDS = [*GOOD, *(pair for pair in BAD.values() if len(pair[1]) < 300)]
PIECES = st.sampled_from(
    [
        *'()[]{}*+?|\\"/^$.:&~_\n\x00é\u2028',
        *("a", "start", "::=", "%json ", "%ignore ", "%regex {", "[max_tokens=2]", "[lazy]"),
        *("{1000}", "{2,}", '"$ref"', '"#"', '{"type":"integer"}', '"multipleOf":7', '""', "<[1]>", "<|eos|>"),
    ]
)


@st.composite
def texts(draw) -> tuple[GrammarKind, str]:
    """A known grammar with pieces put in, cut out and doubled; perhaps taken for one of another kind."""
    kind, text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 5))):
        place = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 6))
        text = text[:place] + draw(PIECES | st.text(max_size=3)) * draw(st.integers(1, 3)) + text[place + cut :]
    return draw(st.sampled_from([kind, kind, *GrammarKind])), text or "a"


@pytest.fixture(scope="module")
def examiner():
    made = Examiner(lambda: Outfit(tokenizer_json(), VOCAB_SIZE, (EOS_ID,)))
    yield made
    made.close()


def follow(matcher, choose) -> None:
    """Up to 20 tokens that the masks allow."""
    for _ in range(20):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(VOCAB_SIZE) if mask >> token_id & 1]
        if fault_of(matcher) is not None:
            return
        assert allowed, "neither a token nor a reason"
        token_id = allowed[choose(len(allowed))]
        if not matcher.consume_token(token_id):
            assert fault_of(matcher) is not None
            return
        if token_id in vocabulary().eos_token_ids:
            return


@QUICK
@given(text=texts(), choices=st.randoms(use_true_random=False))
def test_any_text_gets_a_verdict(examiner, text, choices):
    try:
        asked = grammar(*text)
        passed = examiner.examine(asked)
    except GrammarError:
        return
    follow(compile_grammar(vocabulary(), passed), choices.randrange)
