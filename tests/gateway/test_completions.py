"""`/v1/completions` in one piece: prompts, sampling, lengths, errors of the backend."""

import pytest

from gateway.backend import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    TokenDelta,
    UnavailableError,
)
from kvtransfer.request_parts import EndReason
from tests.gateway.http_world import ScriptedBackend, ids_of, make_world, saying, tokenizer_of_world


def test_an_answer_has_openai_s_shape():
    response = make_world().complete()
    assert response.status_code == 200
    answer = response.json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    num_tokens = len(ids_of("hello world")) + 1  # EOS counts, but is not shown
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(ids_of("hello")),
            "completion_tokens": num_tokens,
            "total_tokens": len(ids_of("hello")) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_ids_are_the_server_s_own():
    world = make_world()
    answers = [world.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "same"}) for _ in range(2)]
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [ids_of("hello")]),
        ([5, 6, 7], [(5, 6, 7)]),
        (["hello", "the"], [ids_of("hello"), ids_of("the")]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
        (["<|im_end|>"], [ids_of("<|im_end|>")]),
    ],
)
def test_prompts_reach_the_backend_as_token_ids(prompt, expected):
    world = make_world()
    answer = world.complete(prompt=prompt).json()
    assert [call[0] for call in world.backend.calls] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_choices_are_in_the_order_of_prompts_and_run_at_once():
    most = []

    def script(prompt, sampling):
        most.append(backend.num_open)
        return [0.05 if prompt == (5,) else 0.0, *saying(f"said {prompt[0]}")]

    backend = ScriptedBackend(script)
    answer = make_world(backend).complete(prompt=[[5], [6], [7]]).json()
    assert [choice["text"] for choice in answer["choices"]] == ["said 5", "said 6", "said 7"]
    assert most == [1, 2, 3]


def test_sampling_reaches_the_backend():
    world = make_world()
    fields = {
        "max_tokens": 7, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"5": -100}, "min_tokens": 3, "ignore_eos": True,
        "stop_token_ids": [9], "seed": -4,
    }  # fmt: skip
    assert world.complete(**fields).status_code == 200
    ((_, sampling),) = world.backend.calls
    expected = {**fields, "logit_bias": {5: -100.0}, "stop_token_ids": (9,)}
    assert {name: getattr(sampling, name) for name in fields} == expected


def test_top_k_minus_one_is_off():
    world = make_world()
    world.complete(top_k=-1)
    assert world.backend.calls[0][1].top_k == 0


def test_seed_is_given_by_the_operator_or_drawn_once_a_call():
    world = make_world(default_seed=11)
    world.complete()
    assert world.backend.calls[0][1].seed == 11
    world = make_world()
    world.complete(prompt=["a", "b"])
    world.complete(prompt="a")
    seeds = [sampling.seed for _, sampling in world.backend.calls]
    assert seeds[0] == seeds[1] != seeds[2]


def test_null_means_absent():
    world = make_world()
    assert world.complete(temperature=None, max_tokens=None, stop=None, logprobs=None, n=None).status_code == 200
    assert world.backend.calls[0][1].temperature == 1.0


# --- lengths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, 16), (84, 16), (90, 10), (99, 1)])
def test_max_tokens_is_16_or_what_fits(num_prompt, max_tokens):
    world = make_world()
    assert world.complete(prompt=[5] * num_prompt).status_code == 200
    assert world.backend.calls[0][1].max_tokens == max_tokens


@pytest.mark.parametrize("num_prompt", [100, 101, 5000])
def test_a_prompt_that_is_too_long_is_told_both_numbers(num_prompt):
    response = make_world().complete(prompt=[5] * num_prompt)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(num_prompt) in error["message"]
    assert "100" in error["message"]


def test_a_text_that_is_far_too_long_is_refused_without_tokenising():
    response = make_world().complete(prompt="hello " * 100_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in response.json()["error"]["message"]


def test_prompt_and_output_must_fit_together():
    assert make_world().complete(prompt=[5] * 90, max_tokens=10).status_code == 200
    response = make_world().complete(prompt=[5] * 90, max_tokens=11)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert all(number in response.json()["error"]["message"] for number in ("90", "11", "101", "100"))


# --- ends --------------------------------------------------------------------------------------------


def test_length_is_told_and_a_cut_character_dropped():
    ids = ids_of("ok👍")[:-1]
    backend = ScriptedBackend(lambda prompt, sampling: [TokenDelta(ids, EndReason.LENGTH)])
    answer = make_world(backend).complete().json()
    assert answer["choices"][0]["text"] == "ok"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("wor", "hello ", "stop"), (["zzz", "lo w"], "hel", "stop"), ("xyz", None, "length"), ([], None, "length")],
)
def test_stop_strings_cut_text_and_work(stop, text, reason):
    backend = ScriptedBackend(lambda prompt, sampling: saying("hello world zqzq", EndReason.LENGTH))
    answer = make_world(backend).complete(stop=stop).json()
    assert answer["choices"][0]["text"] == (text or "hello world zqzq")
    assert answer["choices"][0]["finish_reason"] == reason
    assert backend.num_cut == (reason == "stop")
    assert backend.num_open == 0


def test_usage_counts_tokens_until_the_stop():
    text = "the quick brown fox"
    ids = ids_of(text)
    backend = ScriptedBackend(lambda prompt, sampling: saying(text))
    answer = make_world(backend).complete(stop="quick").json()
    texts = [tokenizer_of_world().decode(ids[:count], skip_special_tokens=True) for count in range(len(ids) + 1)]
    expected = next(count for count, part in enumerate(texts) if "quick" in part)
    assert answer["usage"]["completion_tokens"] == expected < len(ids)


def test_the_stop_string_is_shown_if_asked_for():
    backend = ScriptedBackend(lambda prompt, sampling: saying("hello world"))
    answer = make_world(backend).complete(stop="o w", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "hello w"


def test_stop_strings_wait_for_min_tokens():
    backend = ScriptedBackend(lambda prompt, sampling: saying("stop and stop", EndReason.LENGTH))
    assert make_world(backend).complete(stop="stop").json()["choices"][0]["text"] == ""
    first = len(ids_of("stop"))
    answer = make_world(backend).complete(stop="stop", min_tokens=first + 1).json()
    assert answer["choices"][0]["text"] == "stop and "


def test_the_token_that_ends_is_not_shown():
    ids = (*ids_of("a"), *ids_of("b"))
    backend = ScriptedBackend(lambda prompt, sampling: [TokenDelta(ids, EndReason.STOP)])
    answer = make_world(backend).complete(stop_token_ids=[ids[-1]]).json()
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["completion_tokens"] == 2


def test_the_token_that_ends_is_shown_if_stops_are():
    ids = (*ids_of("a"), *ids_of("b"))
    backend = ScriptedBackend(lambda prompt, sampling: [TokenDelta(ids, EndReason.STOP)])
    answer = make_world(backend).complete(stop_token_ids=[ids[-1]], include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("finish", [EndReason.STOP, EndReason.LENGTH])
def test_what_was_held_back_comes_at_the_end(finish):
    backend = ScriptedBackend(lambda prompt, sampling: saying("zq zq st", finish))
    choice = make_world(backend).complete(stop="stop").json()["choices"][0]
    assert choice["text"] == "zq zq st"
    assert choice["finish_reason"] == finish.value


def test_special_tokens_can_be_shown():
    backend = ScriptedBackend(lambda prompt, sampling: saying("a<s>b"))
    assert make_world(backend).complete().json()["choices"][0]["text"] == "ab"
    assert make_world(backend).complete(skip_special_tokens=False).json()["choices"][0]["text"] == "a<s>b"


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("no"), 400, "invalid_request_error"),
        (OverloadedError("no"), 429, "overloaded_error"),
        (UnavailableError("no"), 503, "service_unavailable"),
        (RequestFailedError("no"), 502, "upstream_error"),
        (DeadlineExceededError("no"), 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize(("stream", "num_tokens_before"), [(False, 0), (False, 3), (True, 0)])
def test_errors_of_the_backend_are_http_errors_before_the_first_byte(error, status, kind, stream, num_tokens_before):
    steps = [*saying("zqzqzq")[:num_tokens_before], error]
    world = make_world(ScriptedBackend(lambda prompt, sampling: steps))
    response = world.complete(stream=stream)
    assert response.status_code == status
    assert response.json() == {"error": {"message": "no", "type": kind, "param": None, "code": None}}
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_one_failing_prompt_fails_the_call_and_cancels_the_others():
    def script(prompt, sampling):
        return [0.01, RequestFailedError("lost")] if prompt == (6,) else [TokenDelta((5,), None), 60.0]

    backend = ScriptedBackend(script)
    response = make_world(backend).complete(prompt=[[5], [6], [7]])
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "lost"
    assert backend.num_open == 0
    assert backend.num_cut == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_500_that_says_nothing(stream):
    backend = ScriptedBackend(lambda prompt, sampling: [TimeoutError("secret /path")])
    response = make_world(backend).complete(stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"


def test_a_backend_that_just_ends_is_an_error():
    backend = ScriptedBackend(lambda prompt, sampling: saying("hello")[:1])
    assert make_world(backend).complete().status_code == 502


def test_the_backend_is_told_when_the_call_arrived():
    world = make_world()
    before = world.metrics.clock()
    world.complete(prompt=["a", "b"])
    first, second = world.backend.arrivals
    assert before <= first == second <= world.metrics.clock()


def test_without_workers_it_is_503_with_reasons():
    world = make_world(ScriptedBackend(reasons=("no prefill worker", "no decode worker")))
    response = world.complete()
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no prefill worker; no decode worker"
    assert world.backend.calls == []


def test_an_unknown_model_is_404():
    response = make_world().complete(model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "other" in response.json()["error"]["message"]


@pytest.mark.parametrize("model", ["tiny", "org/tiny", None])
def test_any_served_name_does(model):
    assert make_world().complete(model=model).json()["model"] == (model or "tiny")
