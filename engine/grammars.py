"""The grammars of one worker: examined, compiled, kept; and whether a request's tokens follow its own so far."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLMatcher

from engine.bitmask import words_of
from engine.errors import AccidentError, RejectedError
from engine.request import Request
from grammar.compiler import MatcherCache, compile_grammar, fault_of
from grammar.errors import GrammarError, UndecidedError
from grammar.examiner import Examiner, Outfit
from grammar.vocabulary import Vocabulary, read_tokenizer
from kvtransfer.request_parts import Grammar, SamplingParams

MAX_KEPT: Final = 32
"""Compiled grammars: each may grow to 40 MB while it is followed, and takes far less as a rule."""


class Grammars:
    """Makes matchers. From any thread; one grammar is compiled at a time, and nobody else waits for that."""

    def __init__(self, model_path: Path, num_ids: int, eos_token_ids: Iterable[int]) -> None:
        """Nothing is read before the first grammar comes. `num_ids`: of the model."""
        self._path = model_path
        self._num_ids = num_ids
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiling = threading.Lock()  # the examiner's
        self._lock = threading.Lock()  # the cache's: held for a moment at a time
        self._reading = threading.Lock()  # the vocabulary's
        self._read: Vocabulary | None = None
        self._cache = MatcherCache(MAX_KEPT)
        self._examiner = Examiner(self._outfit)

    def matcher_for(self, request: Request) -> LLMatcher:
        """A matcher that has followed the request's output so far. Takes milliseconds as a rule, and seconds for a
        grammar that is refused. Raises RejectedError, or AccidentError if nothing could be found of the grammar."""
        grammar = request.sampling.grammar
        assert grammar is not None, request.key
        try:
            self._check_vocabulary(grammar)
            matcher = self._kept(grammar) or self._compile(grammar)
        except UndecidedError as error:
            raise AccidentError(f"{grammar.kind.value}: {error}") from error
        except GrammarError as error:
            raise RejectedError(f"{grammar.kind.value}: {error}") from error
        if not matcher.consume_tokens(list(request.output_token_ids)):
            raise RejectedError(f"{grammar.kind.value}: the output so far does not follow it ({fault_of(matcher)})")
        _check_some_token_is_left(matcher, request.sampling, self._num_ids)
        return matcher

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled already, so that a matcher takes next to no time."""
        with self._lock:
            return grammar in self._cache

    def close(self) -> None:
        """Ends the process that examines; nothing unknown is compiled any more."""
        self._examiner.close()

    @property
    def _vocabulary(self) -> Vocabulary:
        """Made once, whoever comes first: it takes a while, and memory."""
        with self._reading:
            if self._read is None:
                self._read = Vocabulary.of_folder(self._path, self._num_ids, self._eos_token_ids)
            return self._read

    def _check_vocabulary(self, grammar: Grammar) -> None:
        if grammar.vocabulary != self._vocabulary.digest:
            raise GrammarError("the gateway's tokenizer is not this model's; give both the same --model")

    def _kept(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            return self._cache.get(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._compiling:
            if (known := self._kept(grammar)) is not None:
                return known  # somebody else has had it compiled meanwhile
            self._examiner.examine(grammar)
            matcher = compile_grammar(self._vocabulary, grammar)
            with self._lock:  # before anybody else may compile: he looks here for what has been
                self._cache.put(grammar, matcher)
            return matcher

    def _outfit(self) -> Outfit:
        return Outfit(read_tokenizer(self._path), self._num_ids, self._eos_token_ids)


def _check_some_token_is_left(matcher: LLMatcher, sampling: SamplingParams, num_ids: int) -> None:
    if not sampling.allowed_token_ids:
        return
    allowed = words_of(sampling.allowed_token_ids, num_ids)
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: len(allowed)]
    if not (mask & allowed).any():
        raise RejectedError("allowed_token_ids holds no token that the grammar allows")
