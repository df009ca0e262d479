"""Nothing a client sends gives a 500, is echoed whole, or is accepted and ignored."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.field_rules import CHAT_RULES, COMPLETION_RULES, DETOKENIZE_RULES, TOKENIZE_RULES
from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.gateway.http_world import NUM_IDS, ids_of, make_world

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}


def post_raw(path, body, headers=JSON):
    return make_world().ask("POST", path, content=body, headers=headers)


def check_refusal(response, status=400, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 1000
    if param is not None:
        assert error["param"] == param
        assert param.partition("[")[0] in error["message"]


RAW_BODIES = {
    "empty": b"",
    "no json": b"prompt=hello",
    "no object": b"[1]",
    "null": b"null",
    "no utf-8": b'{"prompt": "\xff"}',
    "surrogate in utf-8": b'{"prompt": "\xed\xa0\x80"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "lone low surrogate": b'{"prompt": "\\udc00"}',
    "surrogate in a key": b'{"\\ud800": 1}',
    "surrogate in a tolerated field": b'{"prompt": "a", "user": "\\ud800"}',
    "cut": b'{"prompt": "he',
    "trailing": b'{"prompt": "a"} x',
    "deep arrays": b'{"prompt": ' + b"[" * 200_000,
    "deep objects": b'{"prompt": ' + b'{"a":' * 200_000,
    "deep tolerated": b'{"prompt": "a", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "minus infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "huge float": b'{"prompt": "a", "temperature": 1e999}',
    "huge float deep": b'{"prompt": "a", "logit_bias": {"1": 1e999}}',
    "huge float before deep arrays": b'{"temperature": 1e999, "prompt": ' + b"[" * 200_000,
    "huge int": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "many arrays": b'{"prompt": [' + b"[1]," * 600_000 + b"[1]]}",
    "many objects": b'{"prompt": "a", "user": [' + b"{}," * 600_000 + b"{}]}",
    "huge key": b'{"' + b"k" * 100_000 + b'": 1}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", RAW_BODIES)
def test_bodies_that_no_endpoint_takes(path, name):
    check_refusal(post_raw(path, RAW_BODIES[name]))


def test_a_number_out_of_range_is_named():
    check_refusal(post_raw("/v1/completions", RAW_BODIES["huge float"]), param="temperature")
    check_refusal(post_raw("/v1/completions", RAW_BODIES["huge float deep"]), param="logit_bias")


@pytest.mark.parametrize("path", PATHS)
def test_a_type_other_than_json_is_refused(path):
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        check_refusal(post_raw(path, b'{"prompt": "a"}', headers), status=415)


def test_json_with_a_charset_is_fine():
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert post_raw("/v1/completions", b'{"prompt": "a"}', headers).status_code == 200


BIG = "A" * 1_000_000
WRONG_FIELDS = [
    *((field, value) for field in ("max_tokens", "top_k", "seed", "min_tokens") for value in (True, 2.0, "7", [], BIG)),
    *(
        (field, value)
        for field in ("temperature", "top_p", "min_p", "repetition_penalty")
        for value in (True, "1", [1])
    ),
    *((field, value) for field in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "0", False)),
    *((field, value) for field in ("stream", "ignore_eos", "skip_special_tokens") for value in (1, "true", 0, [])),
    ("include_stop_str_in_output", 1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1 << 80),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1 << 31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("seed", 1 << 63),
    ("seed", -(1 << 63) - 1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", ["a"] * 17),
    ("stop", "a" * 513),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [NUM_IDS]),
    ("stop_token_ids", [1] * 1025),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": 100.5}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(NUM_IDS): 1}),
    ("logit_bias", [1]),
    ("logit_bias", {str(n): 1 for n in range(1025)}),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"what": True}),
    ("model", 5),
    ("model", ["tiny"]),
]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS, ids=lambda item: repr(item)[:30])
def test_wrong_values_name_their_field(field, value):
    check_refusal(make_world().complete(**{field: value}), param=None)
    response = make_world().complete(**{field: value})
    assert response.json()["error"]["param"].startswith(field)
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "bound"), [("temperature", "<= 2.0"), ("max_tokens", ">= 1"), ("stop_token_ids", f"[0, {NUM_IDS - 1}]")]
)
def test_the_message_names_the_range(field, bound):
    value = {"temperature": 3, "max_tokens": 0, "stop_token_ids": [5000]}[field]
    assert bound in make_world().complete(**{field: value}).json()["error"]["message"]


WRONG_PROMPTS = [
    *("", [], [[]], [""], ["a", ""], {}, 5, True),
    *([1, "a"], [[1], "a"], [1, [2]], [None], [[["a"]]], [["a"]]),
    *([True], [1.0], [-1], [1 << 70], [NUM_IDS], [[5], [NUM_IDS]]),
    *(["a"] * 129, [[1]] * 129),
]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=lambda prompt: repr(prompt)[:30])
def test_wrong_prompts(prompt):
    response = make_world().complete(prompt=prompt)
    check_refusal(response)
    assert response.json()["error"]["param"].startswith("prompt")


def test_a_missing_prompt_is_named():
    check_refusal(make_world().post("/v1/completions", {"model": "tiny"}), param="prompt")
    check_refusal(make_world().complete(prompt=None), param="prompt")
    check_refusal(make_world().post("/v1/chat/completions", {"model": "tiny"}), param="messages")


@pytest.mark.parametrize(
    ("path", "rules", "request_type"),
    [
        ("/v1/completions", COMPLETION_RULES, CompletionRequest),
        ("/v1/chat/completions", CHAT_RULES, ChatRequest),
        ("/tokenize", TOKENIZE_RULES, TokenizeRequest),
        ("/detokenize", DETOKENIZE_RULES, DetokenizeRequest),
    ],
)
def test_features_that_are_not_built_are_refused_unless_they_ask_for_nothing(path, rules, request_type):
    assert not set(rules.unsupported) & set(request_type.__struct_fields__)
    base = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}, "/detokenize": {"tokens": [5]}}
    body = base.get(path, {"prompt": "a"})
    world = make_world()
    for field, neutrals in rules.unsupported.items():
        for neutral in (None, *neutrals):
            response = world.post(path, {**body, field: neutral})
            assert response.status_code == 200, (field, neutral, response.text)
        response = world.post(path, {**body, field: "something else"})
        check_refusal(response, param=field)
    for field in rules.tolerated:
        assert world.post(path, {**body, field: "anything"}).status_code == 200
    check_refusal(world.post(path, {**body, "temprature": None}), param="temprature")


@pytest.mark.parametrize("field", ["n", "best_of"])
@pytest.mark.parametrize("value", [0, -1, 129, True, 1.0, "1", [1]])
def test_the_number_of_choices_is_bounded(field, value):
    check_refusal(make_world().complete(**{field: value}), param=field)
    if field == "n":
        check_refusal(make_world().chat(n=value), param="n")


def test_best_of_is_at_least_n_and_not_streamed_above_it():
    check_refusal(make_world().complete(n=2, best_of=1), param="best_of")
    check_refusal(make_world().complete(best_of=2, stream=True), param="best_of")
    check_refusal(make_world().complete(best_of=2, max_tokens=0, echo=True), param="best_of")
    check_refusal(make_world().complete(best_of=2, prompt_logprobs=0), param="prompt_logprobs")
    check_refusal(make_world().complete(best_of=2, echo=True, logprobs=0), param="echo")
    check_refusal(make_world().chat(best_of=1), param="best_of")
    assert make_world().complete(n=2, best_of=2, stream=True).status_code == 200


def test_a_value_is_never_echoed_whole():
    world = make_world()
    for body in (
        {"model": BIG, "prompt": "a"},
        {"prompt": "a", "temperature": BIG},
        {"prompt": "a", BIG: 1},
        {"prompt": "a", "stream_options": {BIG: 1}, "stream": True},
        {"prompt": "a", "response_format": {"type": BIG}},
    ):
        response = world.post("/v1/completions", body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 1000
    messages = [{"role": "user", "content": "a", BIG: "b"}]
    assert len(world.post("/v1/chat/completions", {"messages": messages}).content) < 1000
    messages = [{"role": BIG, "content": "a"}]
    assert len(world.post("/v1/chat/completions", {"messages": messages}).content) < 1000
    kwargs = {"chat_template_kwargs": {BIG: 1}}
    assert len(world.chat(**kwargs).content) < 1000


def test_names_are_shown_as_printable_ascii():
    response = make_world().complete(**{"a\r\nb\u202e\x00é": 1})
    assert "a??b???" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], None),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "root", "content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "a", "colour": 1}], "messages[0].colour"),
        ([{"role": "assistant", "content": "the template refuses"}], "messages"),
    ],
)
def test_wrong_messages(messages, param):
    response = make_world().chat(messages=messages)
    check_refusal(response)
    if param is not None:
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "messages", "bos_token", "moods", "padding"])
def test_only_variables_of_the_template_can_be_set(name):
    check_refusal(make_world().chat(chat_template_kwargs={name: "x"}), param="chat_template_kwargs")


def test_max_tokens_has_two_names_that_must_agree():
    check_refusal(make_world().chat(max_tokens=3, max_completion_tokens=4), param="max_completion_tokens")
    assert make_world().chat(max_tokens=3, max_completion_tokens=3).status_code == 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = st.sampled_from(
    [*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, *CHAT_RULES.unsupported, "tokens", "what"]
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), st.dictionaries(FIELD_NAMES, JSON_VALUES, max_size=4), st.booleans())
def test_anything_gets_an_answer(path, fields, with_prompt):
    body = {**({"prompt": "a"} if with_prompt else {}), **fields}
    response = post_raw(path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PATHS), st.binary(max_size=50))
def test_any_bytes_get_an_answer(path, body):
    assert post_raw(path, body).status_code == 400


def test_of_a_field_that_comes_twice_the_last_one_counts():
    world = make_world()
    body = b'{"prompt": "a", "max_tokens": "none", "max_tokens": 3, "prompt": "hello"}'
    response = world.ask("POST", "/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200, response.text
    prompt, sampling = world.backend.calls[-1][:2]
    assert (prompt, sampling.max_tokens) == (ids_of("hello"), 3)
