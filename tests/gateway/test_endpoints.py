"""Models, health, version, tokenising, and the routes that do not exist."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tests.gateway.http_world import NUM_IDS, ScriptedBackend, ids_of, make_world, tokenizer_of_world


def test_models_are_listed_and_shown():
    world = make_world()
    listed = world.ask("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny"]
    for model in listed["data"]:
        shown = world.ask("GET", f"/v1/models/{model['id']}")
        assert shown.json() == model
        assert model["max_model_len"] == 100
    missing = world.ask("GET", "/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_tells_the_reasons():
    assert make_world().ask("GET", "/health").json() == {"status": "ready"}
    response = make_world(ScriptedBackend(reasons=("no decode worker",))).ask("GET", "/health")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reasons": ["no decode worker"]}


def test_version():
    assert make_world().ask("GET", "/version").json() == {"version": "1.2.3"}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/", "/v1/embeddings", "/health/", "//health", "/x" * 500])
def test_unknown_paths_are_404(path):
    response = make_world().ask("GET", path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert len(response.content) < 300


def test_wrong_methods_are_405_and_told_the_right_one():
    response = make_world().ask("GET", "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert make_world().ask("DELETE", "/v1/models").status_code == 405


def test_openapi_describes_every_route_and_the_bodies_as_they_are_checked():
    document = make_world().ask("GET", "/openapi.json").json()
    posts = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/reset_prefix_cache"}
    gets = {"/v1/models", "/v1/models/{name}", "/version", "/health", "/metrics"}
    assert {path for path, item in document["paths"].items() if "post" in item} == posts
    assert {path for path, item in document["paths"].items() if "get" in item} == gets
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prompt"]
    assert schema["properties"]["top_p"]["maximum"] == 1.0


# --- /tokenize, /detokenize --------------------------------------------------------------------------


def test_tokenize_a_prompt():
    answer = make_world().post("/tokenize", {"model": "tiny", "prompt": "hello"}).json()
    assert answer == {"count": len(ids_of("hello")), "max_model_len": 100, "tokens": list(ids_of("hello"))}


def test_tokenize_a_chat():
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n"
    answer = make_world().post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert answer["tokens"] == list(ids_of(text))


def test_tokenize_takes_longer_texts_than_the_model_does_and_needs_no_worker():
    world = make_world(ScriptedBackend(reasons=("no decode worker",)))
    answer = world.post("/tokenize", {"prompt": "zq" * 5000}).json()
    assert answer["count"] == 10_000
    assert answer["max_model_len"] is None


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": ""}])
def test_tokenize_needs_one_thing(body):
    assert make_world().post("/tokenize", body).status_code == 400


def test_detokenize_is_the_way_back():
    text = "hello 👍 <|im_end|>"
    answer = make_world().post("/detokenize", {"tokens": list(ids_of(text))}).json()
    assert answer == {"prompt": text}


def test_detokenize_knows_its_vocabulary():
    assert make_world().post("/detokenize", {"tokens": [NUM_IDS - 1]}).status_code == 200
    response = make_world().post("/detokenize", {"tokens": [NUM_IDS]})
    assert response.status_code == 400
    assert str(NUM_IDS - 1) in response.json()["error"]["message"]
    assert make_world().post("/tokenize", {"prompt": "a", "model": "other"}).status_code == 404


def test_a_huge_text_lets_others_run_while_it_is_tokenised():
    """`tokenizers` holds the interpreter's lock for as long as a call takes, unless it is a batched one."""
    tokenizer = tokenizer_of_world()
    text = "some words of no importance " * 20_000
    beats: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(tokenizer.encode, text, add_special_tokens=False)
        while not work.done():
            beats.append(time.monotonic())
            time.sleep(0.001)
    total = beats[-1] - beats[0]
    longest = max(later - earlier for earlier, later in pairwise(beats))
    assert longest < total / 2
