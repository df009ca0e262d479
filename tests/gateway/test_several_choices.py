"""`n` over HTTP: which choice is which, what counts, and what a stream looks like."""

import pytest

from gateway.backend import OverloadedError
from kvtransfer.request_parts import EndReason
from tests.gateway.http_world import ScriptedBackend, events_of, ids_of, make_world, saying, text_of

WORDS = ("hello world", "quick brown", "lazy dog", "stop stopping")


def backend_of_choices(**fields) -> ScriptedBackend:
    """Each choice says another thing, with the number of its prompt's tokens behind it."""
    return ScriptedBackend(
        lambda prompt, sampling: saying(f"{WORDS[sampling.choice_index]} {len(prompt)}", EndReason.LENGTH), **fields
    )


def test_choices_are_numbered_prompt_by_prompt_and_a_prompt_counts_once():
    world = make_world(backend_of_choices())
    answer = world.complete(prompt=[[5, 6], [7, 8, 9]], n=2, seed=3).json()
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, "hello world 2"), (1, "quick brown 2"), (2, "hello world 3"), (3, "quick brown 3")]
    num_completion = sum(len(ids_of(text)) for _, text in texts)
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == num_completion
    assert answer["usage"]["total_tokens"] == 5 + num_completion
    asked = [(prompt, sampling.choice_index, sampling.seed) for prompt, sampling in world.backend.calls]
    assert asked == [((5, 6), 0, 3), ((5, 6), 1, 3), ((7, 8, 9), 0, 3), ((7, 8, 9), 1, 3)]
    assert "kvsplice:prompt_tokens_total 5.0" in world.ask("GET", "/metrics").text


def test_choices_without_a_seed_share_the_one_that_is_drawn():
    world = make_world(backend_of_choices())
    world.complete(n=4)
    assert len({sampling.seed for _, sampling in world.backend.calls}) == 1


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_stream_has_all_choices(ask):
    world = make_world(backend_of_choices())
    events = events_of(getattr(world, ask)(n=3, stream=True, stream_options={"include_usage": True}))
    whole = getattr(world, ask)(n=3).json()
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole["choices"]]
    assert [text_of(events, index) for index in range(3)] == texts
    assert len(set(texts)) == 3
    finished = [c["index"] for event in events[:-1] for c in event["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    assert events[-2]["usage"] == whole["usage"]


def test_a_choice_that_fails_fails_the_call():
    def script(prompt, sampling):
        return [OverloadedError("busy")] if sampling.choice_index == 2 else saying("hello")

    world = make_world(ScriptedBackend(script))
    assert world.complete(n=3).status_code == 429
    assert world.backend.num_open == 0


def test_more_choices_than_may_ever_run_are_a_mistake():
    world = make_world(max_concurrent_requests=8)
    response = world.complete(prompt=[[5], [6], [7]], n=3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert "9 choices in all, and 8" in response.json()["error"]["message"]
    assert world.complete(prompt=[[5], [6]], n=4).status_code == 200
