"""`use_beam_search` over HTTP: what is asked of the workers, what is answered, what is refused, and how it fails."""

import asyncio
import math
import random

import pytest

from gateway.backend import OverloadedError, TokenDelta, UnavailableError
from gateway.modes import Mode
from kvtransfer.request_parts import EndReason, TokenLogprob
from tests.beams import plain_beams
from tests.gateway.http_world import NUM_IDS, ScriptedBackend, ids_of, make_world, tokenizer_of_world
from tests.gateway.test_hostile_input import check_refusal

PROMPT = ids_of("hello")
EOS = ids_of("<|im_end|>")
LETTERS = ids_of("abcdefghijklmnopqrstuvw")


def row_of(tokens):
    """Log probabilities behind `tokens`: letters and EOS are likely, the rest of the vocabulary is not."""
    draw = random.Random(str(tuple(tokens)))
    logits = [draw.gauss(0, 1) + (6 if token in LETTERS + EOS else 0) for token in range(NUM_IDS)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def script(prompt, sampling):
    tokens = prompt
    for place in range(sampling.max_tokens):
        top = sorted(enumerate(row_of(tokens)), key=lambda pair: -pair[1])[: sampling.num_logprobs]
        token_id, logprob = top[0]
        told = TokenLogprob(logprob, 1, tuple(top))
        finish = EndReason.LENGTH if place == sampling.max_tokens - 1 else None
        yield TokenDelta((token_id,), finish, 3 if place == 0 else 0, (told,))
        tokens = (*tokens, token_id)


def make(**fields):
    return make_world(ScriptedBackend(script, eos_token_ids=frozenset(EOS), goes=Mode.DISAGGREGATED, **fields))


def plain(prompt=PROMPT, **fields):
    return plain_beams(lambda output: row_of(prompt + output), **fields)


def text_of(output):
    return tokenizer_of_world().decode(output, skip_special_tokens=True)


def search(world, **fields):
    response = world.complete(**{"use_beam_search": True, "max_tokens": 6, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("length_penalty", "is_stopped"), [(0.6, [True] * 3), (0.8, [True, False, False])])
def test_choices_are_those_of_a_plain_search(length_penalty, is_stopped):
    answer = search(make(), n=3, length_penalty=length_penalty)
    expected = plain(width=3, num_best=3, max_tokens=6, length_penalty=length_penalty, stop_ids=EOS)
    assert [choice["text"] for choice in answer["choices"]] == [text_of(output) for output in expected.outputs]
    ends = ["stop" if output[-1] in EOS else "length" for output in expected.outputs]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ends
    assert [end == "stop" for end in ends] == is_stopped
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 3
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected.outputs))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}, "of the first request alone"


def test_best_of_is_the_width_and_n_what_is_answered():
    answer = search(make(), n=2, best_of=5, ignore_eos=True, stop_token_ids=[LETTERS[0]])
    expected = plain(width=5, num_best=2, max_tokens=6, stop_ids=LETTERS[:1])
    assert [choice["text"] for choice in answer["choices"]] == [text_of(o).removesuffix("a") for o in expected.outputs]


def test_each_prompt_has_its_own_search_and_log_probabilities_are_told():
    prompts = [[5, 6], [7, 8, 9]]
    answer = search(make(), prompt=prompts, n=2, logprobs=3, return_tokens_as_token_ids=True)
    found = [
        tuple(int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"])
        for choice in answer["choices"]
    ]
    fields = {"width": 2, "num_best": 2, "max_tokens": 6, "stop_ids": EOS}
    assert found == [output for prompt in prompts for output in plain(tuple(prompt), **fields).outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    for choice, output, prompt in zip(answer["choices"], found, [*prompts[:1] * 2, *prompts[1:] * 2], strict=True):
        rows = [row_of((*prompt, *output[:place])) for place in range(len(output))]
        own = [row[token] for row, token in zip(rows, output, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own)
        assert {len(top) for top in choice["logprobs"]["top_logprobs"]} <= {3, 4}


def test_a_chat_is_searched_for_as_well():
    response = make().chat(use_beam_search=True, n=2, max_tokens=4, temperature=0)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 2


def test_echo_stands_before_each_beam():
    answer = search(make(), n=2, echo=True)
    without = search(make(), n=2)
    assert [c["text"] for c in answer["choices"]] == ["hello" + c["text"] for c in without["choices"]]


def test_the_first_request_goes_as_asked_and_the_others_to_decode():
    world = make()
    headers = {"X-KVSplice-Mode": "disaggregated"}
    body = {"prompt": "hello", "use_beam_search": True, "n": 2, "max_tokens": 4, "ignore_eos": True}
    response = world.post("/v1/completions", {**body, "cache_salt": "s", "priority": 2}, headers=headers)
    assert response.headers["X-KVSplice-Mode"] == "disaggregated"
    calls, traits = world.backend.calls, world.backend.traits
    assert len(calls) == 1 + 3 * 2
    assert [sampling.max_tokens for _, sampling in calls] == [2, *[1] * 6]
    assert {(sampling.num_logprobs, sampling.ignore_eos) for _, sampling in calls} == {(4, True)}
    assert [(one.mode, one.is_step) for one in traits] == [(Mode.DISAGGREGATED, False), *[(Mode.LOCAL, True)] * 6]
    assert {(one.cache_salt, one.priority) for one in traits} == {("s", 2)}
    assert [len(prompt) - len(PROMPT) for prompt, _ in calls] == [0, 1, 1, 2, 2, 3, 3]
    metrics = world.ask("GET", "/metrics").text
    assert 'kvsplice:request_success_total{finished_reason="length"} 1.0' in metrics
    assert f"kvsplice:prompt_tokens_total {len(PROMPT)}.0" in metrics
    assert "kvsplice:generation_tokens_total 4.0" in metrics


def test_one_token_asks_for_one():
    world = make()
    search(world, n=2, max_tokens=1)
    assert [sampling.max_tokens for _, sampling in world.backend.calls] == [1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 4}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"seed": 0}, "seed"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop": "a"}, "stop"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"stream": True}, "stream"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"n": 11}, "n"),
        ({"best_of": 11}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": 1}, "use_beam_search"),
    ],
)
def test_what_would_have_no_effect_is_refused(fields, param):
    world = make()
    check_refusal(world.complete(**{"use_beam_search": True, **fields}), param=param)
    assert not world.backend.calls


def failing_at(number, step):
    """The request of this number does `step` in place of an answer."""
    seen = []

    def fail(prompt, sampling):
        seen.append(prompt)
        return [step] if len(seen) == number else list(script(prompt, sampling))

    return make_world(ScriptedBackend(fail))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_request_that_fails_fails_the_call(number):
    world = failing_at(number, OverloadedError("busy"))
    assert world.complete(use_beam_search=True, n=3, max_tokens=5).status_code == 429
    assert world.backend.num_open == 0
    assert len(world.backend.calls) <= 4
    assert 'finished_reason="error"} 1.0' in world.ask("GET", "/metrics").text


@pytest.mark.parametrize(("patience_s", "status"), [(5.0, 200), (0.0, 503)])
def test_a_later_step_waits_for_workers_that_are_away(patience_s, status):
    seen = []

    def away_for_a_while(prompt, sampling):
        seen.append(prompt)
        return [UnavailableError("nobody")] if 3 <= len(seen) <= 4 else list(script(prompt, sampling))

    world = make_world(ScriptedBackend(away_for_a_while), failover_timeout_s=patience_s)
    assert world.complete(use_beam_search=True, n=2, max_tokens=4).status_code == status
    assert world.backend.num_open == 0


def test_a_first_step_does_not_wait():
    world = failing_at(1, UnavailableError("nobody"))
    assert world.complete(use_beam_search=True, n=2, max_tokens=4).status_code == 503
    assert len(world.backend.calls) == 1


def test_workers_that_tell_too_little_fail_it():
    world = make_world(ScriptedBackend(lambda prompt, sampling: [TokenDelta((5,), EndReason.LENGTH)]))
    assert world.complete(use_beam_search=True, max_tokens=5).status_code == 502


def test_one_time_limit_holds_for_all_steps():
    def slow(prompt, sampling):
        return [0.05, *script(prompt, sampling)]

    world = make_world(ScriptedBackend(slow), request_timeout_s=0.2)
    response = world.complete(use_beam_search=True, max_tokens=50, n=2)
    assert response.status_code == 504
    assert 2 <= len(world.backend.calls) <= 10
    assert world.backend.num_open == 0


def test_a_client_that_leaves_cancels_all_of_it():
    async def leave():
        world = failing_at(3, 30.0)
        async with world.client() as client:
            body = {"prompt": "hello", "use_beam_search": True, "n": 3, "max_tokens": 5}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            while len(world.backend.calls) < 4:
                await asyncio.sleep(0.01)
            assert world.backend.num_open > 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return world

    world = asyncio.run(leave())
    assert world.backend.num_open == 0
    assert len(world.backend.calls) == 4
    assert 'finished_reason="abort"} 1.0' in world.ask("GET", "/metrics").text
