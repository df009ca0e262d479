"""Hostile and unusual calls on the real server: each costs its sender an answer and nobody else anything."""

import json
import re
import socket

import httpx
import pytest

from tests.e2e.client import body_of, complete, events, stream
from tests.e2e.cluster import MODEL_NAME

URL = "/v1/completions"


@pytest.fixture
def http(cluster):
    """The server's client; whatever a test has sent, the server still serves afterwards."""
    yield cluster.http
    assert complete(cluster.http, "1 + 1 =", max_tokens=2).num_tokens == 2


def post_raw(http: httpx.Client, content: bytes) -> httpx.Response:
    return http.post(URL, content=content, headers={"content-type": "application/json"})


def assert_refused(response: httpx.Response, status: int) -> dict:
    """The status, OpenAI's shape, and an answer that is short whatever was sent."""
    assert response.status_code == status, response.text
    assert len(response.content) < 2048
    (key, error), *others = response.json().items()
    assert key == "error"
    assert not others
    assert error["message"]
    assert error["type"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "test-model", "prompt": "x", "temperature": NaN}', None),
        (b'{"model": "test-model", "prompt": "x", "temperature": 1e999}', None),
        (b'{"model": "test-model", "prompt": "x", "temperature": "nan"}', "temperature"),
        (b'{"model": "test-model", "prompt": "x", "temperature": -1}', "temperature"),
        (b'{"model": "test-model", "prompt": "x", "top_p": 0}', "top_p"),
        (b'{"model": "test-model", "prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"model": "test-model", "prompt": "x", "max_tokens": 2.5}', "max_tokens"),
        (b'{"model": "test-model", "prompt": "x", "max_tokens": "7"}', "max_tokens"),
        (b'{"model": "test-model", "prompt": "x", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "test-model", "prompt": "x", "surprise": 1}', "surprise"),
        (b'{"model": "test-model", "prompt": "\\ud800"}', None),
        (b'{"model": "test-model", "prompt": ""}', "prompt"),
        (b'{"model": "test-model", "prompt": []}', "prompt"),
        (b'{"model": "test-model", "prompt": [49152]}', "prompt"),
        (b'{"model": "test-model", "prompt": [-1]}', "prompt[0]"),
        (b'{"model": "test-model", "prompt": "x", "stop": ""}', "stop"),
        (b'{"model": "test-model", "prompt": "x", "logit_bias": {"49152": 1}}', "logit_bias"),
        (b'{"model": "test-model", "prompt": "x", "stop_token_ids": [49152]}', "stop_token_ids"),
        (b'{"model": "test-model", "prompt": "x", "max_tokens": 3, "min_tokens": 4}', "min_tokens"),
        (b'{"model": "test-model"}', "prompt"),
        (b'{"model": "test-model", "prompt": "x"', None),
        (b"\xff\xfe", None),
        (b"[]", None),
        (b"", None),
        (b"[" * 100_000, None),
        (b'{"prompt":' * 50_000, None),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(http, body, param):
    error = assert_refused(post_raw(http, body), 400)
    if param is not None:
        assert error["param"] == param


def test_a_large_bad_value_is_not_echoed(http):
    secret = "s3cret" * 200_000
    response = http.post(URL, json=body_of("x", temperature=secret))
    assert_refused(response, 400)
    assert response.text.count("s3cret") <= 11


def test_an_unknown_model_and_an_unknown_route(http):
    assert_refused(http.post(URL, json={**body_of("x"), "model": "nobody"}), 404)
    assert_refused(http.get("/v1/nothing"), 404)
    assert_refused(http.get(URL), 405)


def test_a_body_over_the_limit_is_a_413(http):
    assert_refused(post_raw(http, b'{"prompt": "' + b"x" * (9 << 20)), 413)


def test_a_chunked_body_over_the_limit_is_a_413(http):
    """No length is declared, so the server has to count. It may hang up before the client has sent all."""
    pieces = (b"x" * (1 << 20) for _ in range(12))
    try:
        response = http.post(URL, content=pieces, headers={"content-type": "application/json"})
    except (httpx.WriteError, httpx.RemoteProtocolError):
        return
    assert_refused(response, 413)


def test_a_head_over_64_kib_is_cut_off(cluster, http):
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Filler: ")
        received = b""
        try:
            for _ in range(64):
                connection.sendall(b"y" * 4096)
            received = connection.recv(4096)
        except ConnectionError:
            pass  # refused so firmly that our own sending broke
    assert received == b"" or received.split()[1] in (b"400", b"431")


def test_request_ids_are_echoed_and_never_name_a_request(http):
    responses = [http.post(URL, json=body_of("x", max_tokens=1), headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in responses] == ["same", "same"]
    ids = {response.json()["id"] for response in responses}
    assert len(ids) == 2
    assert all(re.fullmatch(r"cmpl-[0-9a-f-]{32,36}", request_id) for request_id in ids)


# --- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", ["Emoji only: 🙂🙃🌧️☀️ 🙂🙃🌧️☀️ 🙂🙃", "春天来了，花园里的", "Η θάλασσα ήταν ήρεμη και το"]
)
def test_characters_of_many_tokens_arrive_whole(http, prompt):
    streamed = stream(http, prompt, max_tokens=24, ignore_eos=True)
    whole = complete(http, prompt, max_tokens=24, ignore_eos=True)
    assert streamed.text == whole.text
    assert streamed.usage["total_tokens"] == whole.usage["total_tokens"]
    assert not any("\ufffd" in piece for piece in streamed.pieces[:-1])
    assert any(not char.isascii() for char in streamed.text)


@pytest.mark.parametrize("stream_it", [True, False])
def test_a_stop_string_never_shows(http, stream_it):
    """The stop spans tokens and begins and ends inside of words."""
    prompt = "Count: one, two, three, one, two, three, one, two,"
    ask = stream if stream_it else complete
    free = ask(http, prompt, max_tokens=24, ignore_eos=True)
    assert "ee, one, tw" in free.text
    stopped = ask(http, prompt, max_tokens=24, ignore_eos=True, stop=["never", "ee, one, tw"])
    assert stopped.text == free.text[: free.text.index("ee, one, tw")]
    assert stopped.finish_reason == "stop"
    assert stopped.num_tokens < free.num_tokens
    shown = ask(http, prompt, max_tokens=24, ignore_eos=True, stop="ee, one, tw", include_stop_str_in_output=True)
    assert shown.text == stopped.text + "ee, one, tw"


def test_a_stream_is_one_token_a_chunk_with_one_done_at_the_end(http):
    body = body_of("Shopping list:\n-", stream=True, max_tokens=12, ignore_eos=True)
    with http.stream("POST", URL, json={**body, "stream_options": {"include_usage": True}}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        received = list(events(response))
    assert received.count("[DONE]") == 1
    assert received[-1] == "[DONE]"
    chunks = [json.loads(data) for data in received[:-1]]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["model"] for chunk in chunks} == {MODEL_NAME}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert sum(bool(choice["text"]) for chunk in chunks for choice in chunk["choices"]) == 12


def test_a_list_of_prompts_gives_choices_in_order(http):
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Hello"]
    answer = http.post(URL, json={**body_of("x", max_tokens=6), "prompt": prompts}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [complete(http, p, max_tokens=6).text for p in prompts]


def test_what_is_tokenised_comes_back(http):
    text = "Grüße aus 東京 🙂"
    tokens = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 5
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == text


# --- metrics -----------------------------------------------------------------------------------------

PHASES = ("dispatch", "queue", "prefill", "kv_reserve", "kv_start", "kv_transfer", "batch_wait", "decode", "delivery")


def test_the_phases_of_a_request_add_up_to_what_the_gateway_saw(cluster, http):
    def readings():
        names = [f"request_{phase}_time_seconds" for phase in PHASES]
        return [cluster.gauge(f"{name}_sum") for name in [*names, "e2e_request_latency_seconds"]]

    before = readings()
    complete(http, "The lighthouse keeper had not spoken", max_tokens=12, ignore_eos=True)
    *phases, e2e = [after - earlier for after, earlier in zip(readings(), before, strict=True)]
    assert min(phases) >= 0.0
    assert phases[PHASES.index("prefill")] > 0.0
    assert phases[PHASES.index("decode")] > 0.0
    assert sum(phases) == pytest.approx(e2e, abs=0.05)  # what lies between is the last token's text
