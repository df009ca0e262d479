"""The search by itself: equal to a plain one on any table of log probabilities, and not longer than it has to be."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.beam_search import BeamRules, BeamSearch
from kvtransfer.request_parts import TokenLogprob
from tests.beams import plain_beams

VOCAB = 12


def table(seed, stop_ids=(), lift=0.0):
    """Log probabilities of a model that depends on all of its output; `lift`: how much likelier ends are."""

    def logprobs_after(output):
        draw = random.Random(f"{seed} {output}")
        logits = [draw.gauss(0, 1.5) + (lift if token in stop_ids else 0) for token in range(VOCAB)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return logprobs_after


def told_of(row, num):
    top = sorted(enumerate(row), key=lambda pair: -pair[1])[:num]
    return TokenLogprob(top[0][1], 1, tuple(top))


def run(logprobs_after, rules, max_tokens):
    search = BeamSearch(rules, max_tokens)
    num_asked = 0
    while not search.is_over:
        num_asked += len(search.live)
        search.advance([told_of(logprobs_after(beam.token_ids), rules.num_candidates) for beam in search.live])
    return search, num_asked


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from([-1.5, 0.0, 0.5, 1.0, 2.0]),
    stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    lift=st.sampled_from([-2.0, 0.0, 3.0]),
    data=st.data(),
)
def test_equal_to_a_plain_search(seed, width, max_tokens, length_penalty, stop_ids, lift, data):
    num_best = data.draw(st.integers(1, width))
    model = table(seed, stop_ids, lift)
    rules = BeamRules(width, num_best, length_penalty, frozenset(stop_ids))
    search, _ = run(model, rules, max_tokens)
    plain = plain_beams(
        model,
        width=width,
        num_best=num_best,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        stop_ids=stop_ids,
    )
    assert [beam.token_ids for beam in search.best()] == plain.outputs
    assert [rules.score(b.cumulative, len(b.token_ids)) for b in search.best()] == pytest.approx(plain.scores)
    assert [beam.is_stopped for beam in search.best()] == [output[-1] in stop_ids for output in plain.outputs]


def test_it_ends_when_nothing_that_lives_can_win():
    """Ends that are as good as sure leave nothing to find. Longer ones win by a great length penalty, and then the
    search goes on."""
    sure = {0, 1}
    model = table(1, sure, lift=9.0)
    search, num_asked = run(model, BeamRules(2, 2, 1.0, frozenset(sure)), 40)
    assert search.num_steps <= 6
    assert num_asked <= 12
    search, _ = run(model, BeamRules(2, 2, 5.0, frozenset(sure)), 40)
    assert search.num_steps == 40


def test_log_probabilities_are_kept_only_for_who_asks():
    model = table(2)
    for num_told in (None, 0, 3):
        search, _ = run(model, BeamRules(3, 3, num_told=num_told), 4)
        for beam in search.best():
            assert len(beam.logprobs) == (0 if num_told is None else 4)
            assert {len(token.top) for token in beam.logprobs} <= {num_told}
            if beam.logprobs:
                assert sum(token.logprob for token in beam.logprobs) == pytest.approx(beam.cumulative)
    rows = [model(beam.token_ids[:place]) for place in range(4)]
    for token_id, token, row in zip(beam.token_ids, beam.logprobs, rows, strict=True):
        assert token.logprob == row[token_id]
        assert token.rank == 1 + sum(other > row[token_id] for other in row)
