"""What each kind of grammar takes, and what is refused before anything runs."""

import re

import pytest

from grammar.compiler import MatcherCache, compile_grammar
from grammar.errors import CostError, GrammarError
from grammar.source import lark_of
from grammar.vocabulary import Vocabulary, digest_of
from tests.grammar.made_grammars import BAD, GOOD, JSON, LARK, REGEX, digest, grammar, tokenizer_json, vocabulary
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer

TOKENIZER = make_tokenizer()


def accepts(kind, text, output) -> bool:
    matcher = compile_grammar(vocabulary(), grammar(kind, text))
    ids = TOKENIZER.encode(output, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_what_matches_and_what_does_not(kind, text):
    matching, others = GOOD[kind, text]
    assert [output for output in matching if not accepts(kind, text, output)] == []
    assert [output for output in others if accepts(kind, text, output)] == []


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars_are_refused_with_a_printable_reason(name):
    with pytest.raises(GrammarError) as caught:
        compile_grammar(vocabulary(), grammar(*BAD[name]))
    reason = str(caught.value)
    assert reason
    assert len(reason) <= 200
    assert reason.isascii()
    assert reason.isprintable()


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (REGEX, "(a", "unclosed group"),
        (REGEX, "a{3,1}", "the start must be <= the end"),
        (REGEX, "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (REGEX, "a\n\n(b", "unclosed group"),
        (REGEX, "error: " * 500 + "(", "unclosed group"),
        (REGEX, '"\\"' * 300 + r"(a)\1", "backreferences are not supported"),
        (REGEX, "a" * 8000 + r"\b", "lookarounds not supported yet"),
        (JSON, '{"type": "string", "pattern": "(a\\nerror: b"}', "unclosed group"),
        (LARK, 'start: a b\na: /x(/\nb: "q"', "2(4): invalid regex: regex parse error: unclosed group"),
    ],
)
def test_the_reason_is_told_however_long_the_expression(kind, text, reason):
    with pytest.raises(GrammarError, match=re.escape(reason)):
        compile_grammar(vocabulary(), grammar(kind, text))


@pytest.mark.parametrize("name", ["square", "many", "endless"])
def test_costly_ones_are_told_from_wrong_ones(name):
    with pytest.raises(CostError):
        compile_grammar(vocabulary(), grammar(*BAD[name]))


def allowed_by(matcher) -> set[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return {token_id for token_id in range(8 * len(matcher.compute_bitmask())) if mask >> token_id & 1}


def test_at_its_end_only_end_tokens_are_allowed():
    matcher = compile_grammar(vocabulary(), grammar(REGEX, "a"))
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert allowed_by(matcher) == {a}
    assert matcher.consume_token(a)
    assert allowed_by(matcher) == set(vocabulary().eos_token_ids)


def test_ids_beyond_the_tokenizer_are_never_allowed():
    padded = vocabulary(VOCAB_SIZE + 37)
    assert max(allowed_by(compile_grammar(padded, grammar(REGEX, r"(?s).*")))) < VOCAB_SIZE


def test_a_model_without_an_end_token_takes_no_grammars():
    with pytest.raises(GrammarError, match="no end token"):
        Vocabulary(tokenizer_json(), VOCAB_SIZE, (VOCAB_SIZE + 5,))


@pytest.mark.parametrize("text", ["", "{", '{"model": {"type": "none"}}'])
def test_a_tokenizer_that_is_none(text):
    with pytest.raises(GrammarError, match="can't be used for structured output"):
        Vocabulary(text, VOCAB_SIZE, (EOS_ID,))


def test_a_vocabulary_is_named_by_its_tokens():
    assert digest() == vocabulary().digest
    assert digest_of(make_tokenizer().backend_tokenizer) == digest()
    other = make_tokenizer().backend_tokenizer
    other.add_tokens(["more"])
    assert digest_of(other) == digest()


def test_gbnf_is_translated_and_lark_stays_as_it_is():
    gbnf = 'root ::= "a" inner\ninner ::= "b" | "c" inner\n'
    assert accepts(LARK, lark_of(gbnf), "accb")
    assert not accepts(LARK, lark_of(gbnf), "acc")
    assert lark_of(lark_of(gbnf)) == lark_of(gbnf)
    assert lark_of('start: "a"') == 'start: "a"'
    for bad in ("}{", "root ::= missing", "root ::= " + "(" * 9000):
        with pytest.raises(GrammarError):
            lark_of(bad)


def test_the_cache_keeps_what_was_used_last_and_gives_copies():
    cache = MatcherCache(2)
    grammars = [grammar(REGEX, text) for text in ("a+", "b+", "c+")]
    for item in grammars[:2]:
        cache.put(item, compile_grammar(vocabulary(), item))
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert cache.get(grammars[0]).consume_token(a)
    cache.put(grammars[2], compile_grammar(vocabulary(), grammars[2]))
    assert cache.get(grammars[1]) is None
    again = cache.get(grammars[0])
    assert not again.is_accepting()
    assert len(cache) == 2
