"""A worker's grammars: made once, whoever asks, and kept before anybody else may make them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import RejectedError
from engine.grammars import Grammars
from grammar.compiler import MatcherCache
from grammar.vocabulary import Vocabulary
from tests.engine.made_requests import request_with
from tests.grammar.made_grammars import BAD, grammar, regex
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer

WITHIN_S = 30.0


@pytest.fixture
def grammars(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    made = Grammars(tmp_path, VOCAB_SIZE, (EOS_ID,))
    yield made
    made.close()


def test_a_grammar_that_was_compiled_is_known_before_anybody_else_may_compile(grammars, monkeypatch):
    known, put = [], MatcherCache.put

    def put_and_look(cache, wanted, matcher):
        known.append(grammars._compiling.locked())
        put(cache, wanted, matcher)

    monkeypatch.setattr(MatcherCache, "put", put_and_look)
    grammars.matcher_for(request_with(grammar=regex("a")))
    assert known == [True]


def test_two_threads_make_one_vocabulary(grammars, monkeypatch):
    barrier, made, of_folder = threading.Barrier(2), [], Vocabulary.of_folder

    def slow(*args):
        made.append(args)
        time.sleep(0.1)  # for the other one to come in, if nothing holds it
        return of_folder(*args)

    def ask(_):
        barrier.wait(WITHIN_S)
        return grammars._vocabulary

    monkeypatch.setattr(Vocabulary, "of_folder", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ask, range(2))
    assert first is second
    assert len(made) == 1


def test_rejections_name_the_kind(grammars):
    with pytest.raises(RejectedError, match=r"^regex: "):
        grammars.matcher_for(request_with(grammar=grammar(*BAD["unclosed"])))
