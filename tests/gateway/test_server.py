"""The server on real sockets: what a client can do below the level of requests."""

import asyncio
import json
from contextlib import asynccontextmanager, contextmanager

import openai
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.backend import TokenDelta
from gateway.server import BoundedProtocol, ServerConfig, make_server
from kvtransfer.request_parts import EndReason
from tests.gateway.http_world import ScriptedBackend, ids_of, make_world, saying
from tests.gateway.test_streaming import until

GET_VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def no_signals():
    """Stands for uvicorn's signal handlers: signals stay with pytest."""
    yield


@asynccontextmanager
async def serving(backend=None, end_requests=lambda: None, **settings):
    """A running server: (world, port, server)."""
    world = make_world(backend, **{"shutdown_timeout_s": 1.0, **settings})
    server = make_server(world.app, world.settings, host="127.0.0.1", port=0, end_requests=end_requests)
    server.capture_signals = no_signals
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or task.done())
        yield world, server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


async def read_all(reader, within_s=3.0):
    """Everything until the server closes."""
    return await asyncio.wait_for(reader.read(-1), within_s)


async def talk(port, data):
    """Sends bytes and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await read_all(reader)
    finally:
        writer.close()


def post(body, *headers):
    fields = ["host: x", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *fields, "", ""]).encode() + body


def test_h11_is_stated():
    config = ServerConfig(None, make_world().settings, host="127.0.0.1", port=0)
    assert config.http is BoundedProtocol
    assert issubclass(BoundedProtocol, H11Protocol)
    assert config.h11_max_incomplete_event_size == 64 << 10
    config.load()
    assert config.http_protocol_class is BoundedProtocol
    assert config.ws_protocol_class is None
    assert not config.access_log


def test_a_request_over_a_socket_tells_nothing_of_the_server():
    async def scenario():
        async with serving() as (_, port, _):
            return await talk(port, GET_VERSION.replace(b"host: x", b"host: x\r\nconnection: close"))

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b'{"version":"1.2.3"}')
    assert b"server:" not in answer.lower()
    assert b"uvicorn" not in answer.lower()


@pytest.mark.parametrize("head_bytes", [90 << 10, 200 << 10, 2 << 20])
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_large_head_is_refused(head_bytes, is_complete):
    async def scenario():
        async with serving() as (_, port, _):
            head = b"GET /version HTTP/1.1\r\nhost: x\r\nx-filler: " + b"a" * head_bytes
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + (b"\r\n\r\n" if is_complete else b""))
            try:
                return await read_all(reader)
            except ConnectionResetError:  # the server closed while the head was still on its way
                return b"HTTP/1.1 400 "
            finally:
                writer.close()

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 400 ")


def test_a_head_below_the_bound_is_served():
    async def scenario():
        async with serving() as (_, port, _):
            head = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-filler: " + b"a" * (40 << 10)
            return await talk(port, head + b"\r\n\r\n")

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http_gets_one_answer_in_our_shape():
    async def scenario():
        async with serving() as (_, port, _):
            return [await talk(port, data) for data in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" * 50)]

    for answer in asyncio.run(scenario())[:2]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", [b"", b"GET /version HT", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_half_sent_head_is_closed_in_time(data):
    async def scenario():
        async with serving(head_timeout_s=0.2) as (_, port, _):
            started = asyncio.get_running_loop().time()
            answer = await talk(port, data)
            return answer, asyncio.get_running_loop().time() - started

    answer, seconds = asyncio.run(scenario())
    assert answer == b""
    assert 0.15 < seconds < 1.5


def test_a_head_that_drips_is_closed_all_the_same():
    async def scenario():
        async with serving(head_timeout_s=0.3) as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            ended = asyncio.create_task(read_all(reader))
            for byte in b"GET /version HTTP/1.1\r\nx-slow: aaaaaaaaaaaaaaa":
                if ended.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
            is_closed = ended.done()
            ended.cancel()
            writer.close()
            return is_closed

    assert asyncio.run(scenario())


def test_a_head_behind_a_request_has_its_limit_from_the_answer_on():
    backend = ScriptedBackend(lambda *_: [0.5, *saying("hello")])

    async def scenario():
        async with serving(backend, head_timeout_s=0.2) as (_, port, _):
            return await talk(port, post(b'{"prompt": "a"}') + b"GET /version HT")

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_requests_follow_each_other_on_one_connection():
    async def scenario():
        async with serving(head_timeout_s=0.3) as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(GET_VERSION)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
                assert head.startswith(b"HTTP/1.1 200 ")
                await reader.readexactly(len(b'{"version":"1.2.3"}'))
                await asyncio.sleep(0.2)
            writer.close()

    asyncio.run(scenario())


def test_a_body_that_nobody_reads_does_not_keep_its_connection():
    """Answered with 401, and the client goes on and on."""

    async def scenario():
        async with serving(api_key="k", head_timeout_s=0.3) as (_, port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
            assert head.startswith(b"HTTP/1.1 401 ")
            try:
                for _ in range(40):
                    writer.write(b"5\r\nhello\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            except ConnectionError:
                pass
            assert not server.server_state.connections
            writer.close()

    asyncio.run(scenario())


def test_one_connection_too_many_is_turned_away_and_room_comes_back():
    async def scenario():
        async with serving(max_connections=2) as (_, port, server):
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await until(lambda: len(server.server_state.connections) == 2)
            refused = await talk(port, b"")
            held[0][1].close()
            await until(lambda: len(server.server_state.connections) == 1)
            served = await talk(port, GET_VERSION.replace(b"host: x", b"host: x\r\nconnection: close"))
            held[1][1].close()
            return refused, served

    refused, served = asyncio.run(scenario())
    head, _, body = refused.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    assert json.loads(body)["error"]["type"] == "overloaded_error"
    assert served.startswith(b"HTTP/1.1 200 ")


def test_a_byte_that_waits_counts_as_not_read():
    async def scenario():
        async with serving() as (_, port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: len(server.server_state.connections) == 1)
            (connection,) = server.server_state.connections
            writer.close()
            return connection.transport.get_write_buffer_limits()

    assert asyncio.run(scenario()) == (0, 0)


def endless(*_):
    while True:
        yield TokenDelta(ids_of("z") * 50, None)


def test_a_client_that_stops_reading_is_cut_and_its_work_cancelled():
    backend = ScriptedBackend(endless)

    async def scenario():
        async with serving(backend, write_timeout_s=0.3, stream_buffer_tokens=1000) as (_, port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(post(b'{"prompt": "a", "stream": true}'))
            await until(lambda: backend.num_cut == 1, within_s=10)
            await until(lambda: not server.server_state.connections)
            writer.transport.abort()

    asyncio.run(scenario())
    assert backend.num_open == 0


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_leaves_cancels_its_work(stream):
    backend = ScriptedBackend(lambda *_: [*saying("zqzq")[:2], 60.0])

    async def scenario():
        async with serving(backend) as (_, port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(b'{"prompt": "a", "stream": ' + stream + b"}"))
            await until(lambda: backend.num_open == 1)
            writer.close()
            await until(lambda: backend.num_open == 0, within_s=1)

    asyncio.run(scenario())
    assert backend.num_cut == 1


def test_shutdown_ends_streams_in_time_and_quietly(caplog):
    """Also those that the backend does not end when it is told to."""
    backend = ScriptedBackend(lambda *_: [*saying("zqzq")[:2], 60.0])
    told = []

    async def scenario():
        async with serving(backend, lambda: told.append(backend.num_open), shutdown_timeout_s=0.2) as (_, port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(b'{"prompt": "a", "stream": true}'))
            await until(lambda: backend.num_open == 1)
            server.should_exit = True
            await until(lambda: backend.num_open == 0, within_s=2)
            writer.close()

    asyncio.run(scenario())
    assert told == [1]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


# --- the official client -----------------------------------------------------------------------------


def client_of(port):
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)


def test_the_official_client_works():
    text = "the quick 👍 fox"
    messages = [{"role": "user", "content": "hi"}]

    async def scenario():
        async with (
            serving(ScriptedBackend(lambda *_: saying(text)), api_key="k") as (_, port, _),
            client_of(port) as client,
        ):
            whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            completion = await client.completions.create(model="tiny", prompt="a", extra_body={"top_k": 5})
            models = await client.models.list()
            return whole, chunks, completion, models

    whole, chunks, completion, models = asyncio.run(scenario())
    assert whole.choices[0].message.content == text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert completion.choices[0].text == text
    assert [model.id for model in models.data] == ["tiny", "org/tiny"]


def test_the_official_client_raises_its_errors():
    async def scenario():
        backend = ScriptedBackend(lambda *_: [*saying("zqzq")[:2], ValueError("secret")])
        async with serving(backend, api_key="k") as (_, port, _), client_of(port) as client:
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="a")
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.completions.create(model="tiny", prompt="a", temperature=3)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").completions.create(model="tiny", prompt="a")
            stream = await client.completions.create(model="tiny", prompt="a", stream=True)
            with pytest.raises(openai.APIError, match="internal error"):
                async for _ in stream:
                    pass

    asyncio.run(scenario())


def test_many_streams_at_once_each_get_their_own():
    backend = ScriptedBackend(
        lambda prompt, _: (
            [step for token in ids_of("zq" * 20) for step in (0.001, TokenDelta((prompt[0], token), None))]
            + [TokenDelta((), EndReason.LENGTH)]
        )
    )

    async def one(client, token):
        stream = await client.completions.create(model="tiny", prompt=[token], stream=True, max_tokens=90)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def scenario():
        async with serving(backend) as (_, port, _), client_of(port) as client:
            tokens = [ids_of(letter)[0] for letter in "abcdefgh"] * 2
            return await asyncio.gather(*(one(client, token) for token in tokens))

    expected = ["".join(f"{letter}{char}" for char in "zq" * 20) for letter in "abcdefgh"] * 2
    assert asyncio.run(scenario()) == expected
    assert backend.num_open == 0
