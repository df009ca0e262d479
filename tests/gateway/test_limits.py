"""The guards before the application: keys, sizes, numbers, ids."""

import asyncio

import pytest

from gateway.limits import HttpSettings
from kvtransfer.errors import SettingsError
from tests.gateway.http_world import ScriptedBackend, make_world, saying
from tests.gateway.test_streaming import Client, scope_of, until

KEY = "clé-secret"


def authorization(value):
    return {"headers": {"authorization": value}}


# --- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", b"Bearer wrong")],
        [("authorization", b"Bearer ")],
        [("authorization", KEY.encode())],
        [("authorization", b"Basic " + KEY.encode())],
        [("authorization", b"Bearer " + KEY.encode() + b"x")],
        [("authorization", b"Bearer " + KEY.encode()[:-1])],
        [("authorization", b"Bearer \xff\xfe")],
        [("authorization", b"Bearer " + KEY.encode()), ("authorization", b"Bearer wrong")],
    ],
)
def test_without_the_key_nothing_is_read_or_told(headers):
    world = make_world(api_key=KEY)
    requests = [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/none"), ("GET", "/health/x")]
    for method, path in requests:
        response = world.ask(method, path, headers=[*headers, ("content-type", "application/json")], content=b"{bad")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in response.text


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer "])
def test_with_the_key_all_is_served(scheme):
    headers = [("authorization", scheme + KEY.encode())]
    assert make_world(api_key=KEY).ask("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_health_and_metrics_need_no_key(path):
    assert make_world(api_key=KEY).ask("GET", path).status_code == 200


def test_the_body_is_not_read_without_the_key():
    world = make_world(api_key=KEY)

    async def scenario():
        async def receive():
            raise AssertionError("the body was read")

        client = Client(b"")
        await world.app(scope_of("/v1/completions"), receive, client.send)
        return client.sent

    assert asyncio.run(scenario())[0]["status"] == 401


# --- bodies ------------------------------------------------------------------------------------------


def ask_in_chunks(world, chunks, delay=0.0):
    """Sends a body of unknown length; returns the status and how many chunks were asked for."""
    left = list(chunks)

    async def receive():
        if not left:
            await asyncio.sleep(60)
        await asyncio.sleep(delay)
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": True}

    async def scenario():
        client = Client(b"")
        await asyncio.wait_for(world.app(scope_of("/v1/completions"), receive, client.send), 5)
        return client.sent[0]["status"]

    return asyncio.run(scenario()), len(chunks) - len(left)


def test_a_body_over_the_bound_is_413():
    world = make_world(max_body_bytes=1000)
    assert world.complete(prompt="a" * 900).status_code == 400  # too long for the model, but read
    response = world.complete(prompt="a" * 1000)
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the body of the request may have at most 1000 bytes"


def test_a_declared_length_is_refused_before_reading():
    world = make_world(max_body_bytes=1000)

    async def scenario(value):
        async def receive():
            raise AssertionError("the body was read")

        client = Client(b"")
        scope = scope_of("/v1/completions")
        scope["headers"].append((b"content-length", value))
        await world.app(scope, receive, client.send)
        return client.sent[0]["status"]

    for value in (b"1001", b"9" * 18, b"9" * 5000, b"-1", b"ten"):
        assert asyncio.run(scenario(value)) == 413


def test_a_chunked_body_is_counted_as_it_comes():
    assert ask_in_chunks(make_world(max_body_bytes=1000), [b"x" * 100] * 100) == (413, 11)


def test_a_slow_body_is_408():
    status, num_read = ask_in_chunks(make_world(body_timeout_s=0.2), [b"x"] * 1000, delay=0.05)
    assert status == 408
    assert num_read < 10


# --- numbers -----------------------------------------------------------------------------------------


def test_one_request_too_many_is_429_at_once_and_room_comes_back():
    backend = ScriptedBackend(lambda *_: [0.1, *saying("hello")])
    world = make_world(backend, max_concurrent_requests=2)

    async def scenario():
        async with world.client() as client:
            ask = lambda: client.post("/v1/completions", json={"prompt": "a"})  # noqa: E731
            running = [asyncio.create_task(ask()) for _ in range(2)]
            await until(lambda: backend.num_open == 2)
            refused = await ask()
            health = await client.get("/health")
            done = await asyncio.gather(*running)
            return refused, health, [*done, await ask()]

    refused, health, served = asyncio.run(scenario())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert health.status_code == 200
    assert [response.status_code for response in served] == [200, 200, 200]


# --- ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["a", "req-1", "with space", "x" * 128, '~!"#'])
def test_a_printable_request_id_is_echoed(request_id):
    for path in ("/v1/models", "/none"):
        response = make_world().ask("GET", path, headers={"x-request-id": request_id})
        assert response.headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", [b"", b" ", b"x" * 129, b"\xc3\xa9", b"a\tb", b"a\x00b"])
def test_any_other_is_replaced(request_id):
    response = make_world(api_key=KEY).ask("GET", "/v1/models", headers=[("x-request-id", request_id)])
    assert response.status_code == 401
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-request-id"].encode() != request_id


def test_settings_are_checked():
    good = {"served_model_names": ("a",), "version": "1"}
    assert HttpSettings(**good).max_body_bytes == 8 << 20
    for bad in (
        {"served_model_names": ()},
        {"served_model_names": ("",)},
        {"api_key": ""},
        {"max_body_bytes": 0},
        {"stream_buffer_tokens": 0},
        {"head_timeout_s": -1.0},
    ):
        with pytest.raises(SettingsError):
            HttpSettings(**{**good, **bad})
