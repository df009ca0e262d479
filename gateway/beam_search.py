"""Beam search over what is told of the likeliest next tokens. Knows no request and no worker.

    live, at most `width`          finished, the best `width`
    (nothing)
      | each goes on with its 2 x width likeliest tokens; the best `width` of all that don't end go on
    A   B   C                      </s>
    AB  AC  CA                     </s>   B</s>
    ...                            until nothing that lives can get among the finished, or has `max_tokens` tokens

    score = sum of the log probabilities of the output's tokens / their number ** length_penalty

as in transformers; the token that ends a beam is one of its tokens. While beams live they are of one length, so the sum
alone compares them. 2 x width candidates of each leave `width` beams even if one token of each ends it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.request_parts import TokenLogprob


@dataclass(frozen=True)
class BeamRules:
    """`width`: beams that live at once; the best `num_best` of them are the answer. `stop_ids`: tokens that end one.
    `num_told`: alternatives that are kept with each token's log probability, None: neither is."""

    width: int
    num_best: int
    length_penalty: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    num_told: int | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.num_best <= self.width, f"{self.num_best} of {self.width} beams"

    @property
    def num_candidates(self) -> int:
        """Tokens with which each beam may go on."""
        return 2 * self.width

    def score(self, cumulative: float, length: int) -> float:
        return cumulative / math.pow(length, self.length_penalty)


@dataclass(frozen=True)
class Beam:
    """Output tokens, and the sum of their log probabilities. `logprobs`: of each token, if they are kept. `is_stopped`:
    by its last token."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative: float = 0.0
    is_stopped: bool = False


@dataclass(frozen=True)
class _Candidate:
    """Beam number `parent` with one more token, the `place`-th likeliest there."""

    parent: int
    place: int
    token_id: int
    cumulative: float


class BeamSearch:
    """One search, step by step: ask for what may follow each of `live`, and `advance` with that."""

    def __init__(self, rules: BeamRules, max_tokens: int) -> None:
        self.num_steps = 0
        self._rules = rules
        self._max_tokens = max_tokens
        self._live: list[Beam] = [Beam()]
        self._finished: list[Beam] = []

    @property
    def live(self) -> Sequence[Beam]:
        """The beams that go on, the likeliest one first."""
        return self._live

    @property
    def is_over(self) -> bool:
        return self.num_steps == self._max_tokens or not self._can_improve()

    def advance(self, told: Sequence[TokenLogprob]) -> None:
        """`told`: for each live beam the likeliest next tokens, `num_candidates` at least."""
        assert not self.is_over, f"step {self.num_steps} of {self._max_tokens}"
        assert len(told) == len(self._live), f"{len(told)} answers for {len(self._live)} beams"
        candidates = sorted(self._candidates(told), key=lambda candidate: candidate.cumulative, reverse=True)
        going = [candidate for candidate in candidates if candidate.token_id not in self._rules.stop_ids]
        ended = [candidate for candidate in candidates if candidate.token_id in self._rules.stop_ids]
        width = self._rules.width
        self._finished = self._ranked([*self._finished, *(self._grown(one, told) for one in ended[:width])])[:width]
        self._live = [self._grown(candidate, told) for candidate in going[:width]]
        self.num_steps += 1

    def best(self) -> list[Beam]:
        """The answer of a search that is over, the best one first. What still lives ends with `max_tokens`; before that
        it can't be better than what has finished."""
        assert self.is_over, f"step {self.num_steps} of {self._max_tokens}"
        cut = self._live if self.num_steps == self._max_tokens else []
        return self._ranked([*self._finished, *cut])[: self._rules.num_best]

    def _can_improve(self) -> bool:
        """Whether anything that lives may get among the finished. Its sum can only fall, and a greater length may
        divide it by more or by less, so the best that it may come to is with the next token or with the last one."""
        if not self._live or len(self._finished) < self._rules.width:
            return bool(self._live)
        sum_now, worst = self._live[0].cumulative, self._score(self._finished[-1])
        return any(self._rules.score(sum_now, length) > worst for length in (self.num_steps + 1, self._max_tokens))

    def _candidates(self, told: Sequence[TokenLogprob]) -> list[_Candidate]:
        num = self._rules.num_candidates
        return [
            _Candidate(parent, place, token_id, self._live[parent].cumulative + logprob)
            for parent, said in enumerate(told)
            for place, (token_id, logprob) in enumerate(said.top[:num])
        ]

    def _grown(self, candidate: _Candidate, told: Sequence[TokenLogprob]) -> Beam:
        beam, top = self._live[candidate.parent], told[candidate.parent].top
        num_told = self._rules.num_told
        token = TokenLogprob(top[candidate.place][1], candidate.place + 1, top[:num_told])
        return Beam(
            (*beam.token_ids, candidate.token_id),
            beam.logprobs if num_told is None else (*beam.logprobs, token),
            candidate.cumulative,
            candidate.token_id in self._rules.stop_ids,
        )

    def _ranked(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)

    def _score(self, beam: Beam) -> float:
        return self._rules.score(beam.cumulative, len(beam.token_ids))
