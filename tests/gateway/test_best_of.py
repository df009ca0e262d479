"""`best_of` over HTTP: which choices are answered, in which order, and what of the others is seen."""

import pytest

from gateway.backend import TokenDelta
from gateway.choice_text import ShownToken, TextDelta
from gateway.ranking import best_of
from kvtransfer.request_parts import EndReason, TokenLogprob
from tests.gateway.http_world import ScriptedBackend, ids_of, make_world

TEXTS = ("a", "bc", "def", "ghij")
EACH = (-2.0, -1.5, -0.5, -1.0)
"""Log probability of each token of these. Summed up the longest is the worst, and `a` beats `bc`."""


def backend_of_likelihoods() -> ScriptedBackend:
    def script(prompt, sampling):
        ids = ids_of(TEXTS[sampling.choice_index])
        assert len(ids) == len(TEXTS[sampling.choice_index])
        top = tuple((token, -0.1) for token in ids_of("xyz")[: sampling.num_logprobs or 0])
        told = TokenLogprob(EACH[sampling.choice_index], 1, top)
        for place, token in enumerate(ids):
            likely = () if sampling.num_logprobs is None else (told,)
            yield TokenDelta((token,), EndReason.LENGTH if place == len(ids) - 1 else None, 0, likely)

    return ScriptedBackend(script)


def ask(**fields):
    world = make_world(backend_of_likelihoods())
    response = world.complete(**fields)
    assert response.status_code == 200, response.text
    return world, response.json()


@pytest.mark.parametrize(("n", "texts"), [(1, ["def"]), (2, ["def", "ghij"]), (3, ["def", "ghij", "bc"])])
def test_the_best_per_token_come_first_and_all_that_was_generated_counts(n, texts):
    world, answer = ask(n=n, best_of=4)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * n, "nobody has asked"
    assert answer["usage"]["completion_tokens"] == sum(map(len, TEXTS))
    assert [sampling.num_logprobs for _, sampling in world.backend.calls] == [0] * 4


def test_who_asks_for_log_probabilities_gets_those_of_the_best():
    world, answer = ask(best_of=4, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert [set(top) for top in choice["logprobs"]["top_logprobs"]] == [{"x", "y", own} for own in "def"]
    assert [sampling.num_logprobs for _, sampling in world.backend.calls] == [2] * 4


def test_without_more_than_n_nothing_is_ranked():
    world, answer = ask(n=4, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == list(TEXTS)
    assert {sampling.num_logprobs for _, sampling in world.backend.calls} == {None}


def test_each_prompt_has_its_best():
    _, answer = ask(prompt=[[5, 6], [7, 8, 9]], n=2, best_of=4)
    found = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert found == list(enumerate(["def", "ghij", "def", "ghij"]))
    assert answer["usage"]["prompt_tokens"] == 5


def test_what_lies_behind_a_stop_string_does_not_count():
    _, answer = ask(n=4, best_of=4, stop="d")
    assert [choice["text"] for choice in answer["choices"]] == ["a", "bc", "", "ghij"]
    _, answer = ask(n=3, best_of=4, stop="d")
    assert [choice["text"] for choice in answer["choices"]] == ["ghij", "bc", "a"], "the empty one comes last"


def test_equals_stay_in_their_order():
    equals = [TextDelta(i, str(i), 1, "stop", (ShownToken(5, TokenLogprob(-1.0, 1), 0),)) for i in range(4)]
    assert [choice.index for choice in best_of(equals, 3)] == [0, 1, 2]
