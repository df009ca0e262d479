"""Outputs of a given form, from the HTTP call to the text: over both roles and locally, whole and streamed, and over
the death of a worker."""

import json
import re
import signal

import openai
import pytest

from tests.e2e.client import body_of, complete, stream
from tests.e2e.cluster import DECODE, MODEL_NAME
from tests.e2e.processes import wait_until
from tests.e2e.streaming import NOTICED_WITHIN_S, PROMPT, Streaming
from tests.grammar.made_grammars import BOMBS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUESTION = "Describe a person as JSON with name, age and tags: "
LOCAL = {"X-KVSplice-Mode": "local"}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 24
    assert 0 <= person["age"] <= 120
    assert 1 <= len(person["tags"]) <= 3
    assert set(person["tags"]) <= {"red", "green", "blue"}


def post(cluster, headers=None, **fields):
    return cluster.http.post("/v1/completions", json=body_of(QUESTION, **fields), headers=headers)


@pytest.mark.parametrize("mode", ["disaggregated", "local"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_by_a_schema(cluster, mode, temperature):
    fields = {"guided_json": SCHEMA, "temperature": temperature, "max_tokens": 200}
    for seed in (1, 2, 3):
        response = post(cluster, {"X-KVSplice-Mode": mode}, seed=seed, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["X-KVSplice-Mode"] == mode
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "stop"
        check_person(choice["text"])


def test_streamed_is_whole_and_local_is_disaggregated(cluster):
    fields = {"guided_json": SCHEMA, "temperature": 1.0, "seed": 11, "max_tokens": 200}
    whole = complete(cluster.http, QUESTION, **fields)
    check_person(whole.text)
    assert stream(cluster.http, QUESTION, **fields).text == whole.text
    assert post(cluster, LOCAL, **fields).json()["choices"][0]["text"] == whole.text


def test_the_official_client_gets_what_its_response_format_says(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        ask = {"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "seed": 4}
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
        check_person(client.chat.completions.create(response_format=form, **ask).choices[0].message.content)
        answer = client.chat.completions.create(response_format={"type": "json_object"}, temperature=0, **ask).choices[
            0
        ]
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
                **ask,
            )
        assert caught.value.param == "response_format.json_schema.schema"


def test_one_of_the_choices(cluster):
    choices = ["yes", "no", "not sure at all", "é😀"]
    found = {
        complete(cluster.http, "Is the sky blue?", guided_choice=choices, temperature=2.0, seed=seed).text
        for seed in range(12)
    }
    assert found <= set(choices)
    assert len(found) > 1


def test_a_regex_matches_all_of_the_output(cluster):
    form = r"[A-Z][a-z]{2,8} \d{4}-\d{2}-\d{2}"
    for seed in range(4):
        answer = complete(cluster.http, "Date: ", guided_regex=form, temperature=1.0, seed=seed, max_tokens=40)
        assert re.fullmatch(form, answer.text), answer.text


def test_both_kinds_of_grammar(cluster):
    for grammar in ('start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'):
        text = complete(cluster.http, "x", structured_outputs={"grammar": grammar}, max_tokens=8).text
        opened = len(text) - len(text.lstrip("("))
        assert text in ("(" * opened + "x" + ")" * opened, "(" * opened)


def test_a_stop_string_ends_a_form_early(cluster):
    answer = complete(cluster.http, "a", guided_regex="[ab]{4}STOP[ab]{4}", stop=["STOP"], max_tokens=40)
    assert answer.finish_reason == "stop"
    assert re.fullmatch("[ab]{4}", answer.text)


def test_bad_words_and_allowed_token_ids(cluster):
    plain = complete(cluster.http, "The capital of France is", max_tokens=4)
    assert " Paris" in plain.text
    assert "Paris" not in complete(cluster.http, "The capital of France is", max_tokens=4, bad_words=["Paris"]).text
    ids = cluster.http.post("/tokenize", json={"prompt": " London Rome"}).json()["tokens"]
    text = complete(cluster.http, "The capital of France is", max_tokens=3, allowed_token_ids=ids).text
    assert set(text.split()) <= {"London", "Rome"}


def test_rules_that_leave_nothing_are_an_error_and_the_pools_are_empty(cluster):
    response = post(cluster, guided_choice=["yes"], min_tokens=5, max_tokens=8)
    assert response.status_code == 400
    assert "leaves no token" in response.json()["error"]["message"]
    ids = cluster.http.post("/tokenize", json={"prompt": " London"}).json()["tokens"]
    response = post(cluster, guided_choice=["yes"], allowed_token_ids=ids)
    assert response.status_code == 400
    assert "allowed_token_ids holds no token" in response.json()["error"]["message"]
    cluster.wait_pools_empty()


def test_a_bomb_is_a_400_while_a_stream_goes_on(cluster):
    with Streaming(cluster, prompt="Once upon a time", max_tokens=120) as streaming:
        kind, text = BOMBS["multiple"]
        response = post(cluster, guided_json=text)
        assert kind.value == "json_schema"
        assert response.status_code == 400
    assert (streaming.errors, streaming.num_tokens) == ([], 120)


def test_a_form_outlives_its_decode_worker(healthy):
    form = "([a-f][0-9]){1500}!"
    fields = {"guided_regex": form, "max_tokens": 4000, "ignore_eos": False, "temperature": 0.9, "seed": 3}
    undisturbed = stream(healthy.http, PROMPT, **fields)
    assert re.fullmatch(form, undisturbed.text)
    with Streaming(healthy, **fields) as streaming:
        healthy.kill(DECODE, signal.SIGKILL)
        wait_until(lambda: not healthy.is_ready(), within_s=NOTICED_WITHIN_S, what="the gateway has noticed")
        healthy.restart(DECODE)
    assert (streaming.errors, streaming.num_done, streaming.was_cut) == ([], 1, False)
    assert streaming.text == undisturbed.text
