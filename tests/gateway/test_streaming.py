"""Streams: what is in them, how they end, and that they say the same as an answer in one piece."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backend import DeadlineExceededError, RequestFailedError, TokenDelta
from gateway.sse import COMMENT
from kvtransfer.request_parts import EndReason
from tests.gateway.http_world import ScriptedBackend, events_of, ids_of, make_world, saying, text_of, tokenizer_of_world


def test_a_completion_streams_one_token_a_chunk():
    text = "the dog 👍!"
    events = events_of(make_world(ScriptedBackend(lambda *_: saying(text))).complete(stream=True))
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "text_completion"
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "👍" in pieces
    assert "".join(pieces) == text
    assert len(pieces) == len(ids_of(text)) - 3 + 1  # three of the emoji's tokens have no text; one chunk is the end
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_a_chat_begins_with_the_role():
    events = events_of(make_world().chat(stream=True))
    choices = [event["choices"][0] for event in events[:-1]]
    assert events[0]["object"] == "chat.completion.chunk"
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert text_of(events) == "hello world"


def test_usage_comes_in_a_chunk_of_its_own():
    events = events_of(make_world().complete(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    num_tokens = len(ids_of("hello world")) + 1
    assert events[-2]["usage"]["completion_tokens"] == num_tokens
    assert events[-2]["usage"]["total_tokens"] == num_tokens + len(ids_of("hello"))


def test_usage_so_far_counts_tokens_without_text():
    backend = ScriptedBackend(lambda *_: saying("a👍b"))
    fields = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    events = events_of(make_world(backend).complete(**fields))[:-1]
    counts = [(event["choices"][0]["text"], event["usage"]["completion_tokens"]) for event in events]
    assert counts == [("a", 1), ("👍", 5), ("b", 6), ("", 7)]


def test_several_tokens_at_once_are_several_chunks():
    ids = ids_of("zqzqz")
    backend = ScriptedBackend(lambda *_: [TokenDelta(ids, EndReason.LENGTH)])
    events = events_of(make_world(backend).complete(stream=True))
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["z", "q", "z", "q", "z", ""]


def test_choices_of_several_prompts_are_told_apart():
    backend = ScriptedBackend(lambda prompt, _: [*saying(f"said {prompt[0]}"), 0.0])
    events = events_of(make_world(backend).complete(prompt=[[5], [6], [7]], stream=True))
    assert [text_of(events, index) for index in range(3)] == ["said 5", "said 6", "said 7"]
    ends = [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert events.count("[DONE]") == 1


def test_an_error_on_the_way_ends_the_stream_without_done():
    errors = (
        (RequestFailedError("lost"), "upstream_error"),
        (DeadlineExceededError("late"), "timeout_error"),
        (ValueError("secret"), "server_error"),
    )
    for error, kind in errors:
        backend = ScriptedBackend(lambda *_, error=error: [*saying("zqzqzqzq")[:3], 0.01, error])
        response = make_world(backend).chat(stream=True)
        assert response.status_code == 200
        events = events_of(response)
        assert "[DONE]" not in events
        assert events[-1]["error"]["type"] == kind
        assert "secret" not in response.text
        assert [event for event in events if "error" in event] == events[-1:]
        assert backend.num_open == 0


def test_silence_is_filled_with_comments():
    backend = ScriptedBackend(lambda *_: [saying("hello")[0], 0.2, *saying("world")])
    response = make_world(backend, sse_comment_s=0.05).complete(stream=True)
    assert 1 <= response.content.count(COMMENT) <= 4
    assert text_of(events_of(response)).endswith("world")


def test_a_stop_string_ends_the_stream_and_the_work():
    backend = ScriptedBackend(lambda *_: saying("hello world and more", EndReason.LENGTH))
    events = events_of(make_world(backend).complete(stream=True, stop=["o wor"]))
    assert text_of(events) == "hell"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert (backend.num_cut, backend.num_open) == (1, 0)


ANY_IDS = st.lists(st.sampled_from([*range(259), *ids_of("stop the dog 👍 日本")]), min_size=1, max_size=20)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(ANY_IDS, min_size=1, max_size=4),
    st.lists(st.sampled_from(["s", "sto", "op", "👍", " the", "ab", "\n"]), max_size=3),
    st.sampled_from([EndReason.STOP, EndReason.LENGTH]),
    st.booleans(),
)
def test_a_stream_says_what_the_whole_answer_says(deltas, stops, finish, include):
    """Also: the text is that of the tokens, cut before the first stop string."""
    steps = [TokenDelta(tuple(ids), None) for ids in deltas[:-1]] + [TokenDelta(tuple(deltas[-1]), finish)]
    world = make_world(ScriptedBackend(lambda *_: steps))
    fields = {"stop": stops, "include_stop_str_in_output": include}
    whole = world.complete(**fields).json()
    events = events_of(world.complete(**fields, stream=True, stream_options={"include_usage": True}))
    assert text_of(events) == whole["choices"][0]["text"]
    assert events[-3]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-2]["usage"] == whole["usage"]
    if not include:
        ids = [token for step in steps for token in step.token_ids]
        shown = ids[:-1] if finish is EndReason.STOP else ids
        text = tokenizer_of_world().decode(shown, skip_special_tokens=True)
        text = text.rstrip("\ufffd")
        places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert text_of(events) == (text[: min(places)[1]] if places else text)


# --- clients that leave or do not read ---------------------------------------------------------------


class Client:
    """Talks ASGI to the application: reads `num_reads` body messages, then stops reading or leaves."""

    def __init__(self, body: bytes) -> None:
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._body = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self):
        if self._body:
            return self._body.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.may_write.wait()
        self.sent.append(message)


def scope_of(path):
    headers = [(b"content-type", b"application/json")]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "scheme": "http",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip


async def until(condition, within_s=5.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("num_said", [0, 3])
def test_a_client_that_leaves_cancels_the_work(stream, num_said):
    backend = ScriptedBackend(lambda *_: [*saying("zqzqzqzq")[:num_said], 60.0])
    world = make_world(backend)

    async def scenario():
        client = Client(b'{"prompt": ["a", "b"], "stream": ' + stream + b"}")
        task = asyncio.create_task(world.app(scope_of("/v1/completions"), client.receive, client.send))
        await until(lambda: backend.num_open == 2)
        await asyncio.sleep(0.02)
        assert not task.done()
        client.gone.set()
        await asyncio.wait_for(task, 1)

    asyncio.run(scenario())
    assert (backend.num_open, backend.num_cut) == (0, 2)
    assert b'kvsplice:request_success_total{finished_reason="abort"} 2.0' in world.metrics.render()


def test_a_client_that_leaves_within_its_body_is_no_error():
    world = make_world()

    async def scenario():
        sent = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await world.app(scope_of("/v1/completions"), receive, send)

    asyncio.run(scenario())
    assert world.backend.calls == []


def test_a_client_that_does_not_read_is_cancelled_at_the_bound():
    produced = []

    def script(*_):
        for number in range(10_000):
            produced.append(number)
            yield TokenDelta(ids_of("z"), None)

    backend = ScriptedBackend(script)
    world = make_world(backend, stream_buffer_tokens=50)

    async def scenario():
        client = Client(b'{"prompt": "a", "stream": true}')
        client.may_write.clear()
        task = asyncio.create_task(world.app(scope_of("/v1/completions"), client.receive, client.send))
        await until(lambda: backend.num_cut == 1)
        assert backend.num_open == 0
        assert len(produced) <= 55
        client.may_write.set()
        await asyncio.wait_for(task, 1)
        return client.sent

    sent = asyncio.run(scenario())
    body = b"".join(message.get("body", b"") for message in sent)
    assert b"not read fast enough" in body
    assert b"[DONE]" not in body


def test_a_failure_cancels_the_others_though_the_client_does_not_read():
    def script(prompt, _):
        first = saying("zq")[:1]
        return [*first, 0.05, RequestFailedError("lost")] if prompt == (6,) else [*first, 60.0]

    backend = ScriptedBackend(script)
    world = make_world(backend)

    async def scenario():
        client = Client(b'{"prompt": [[5], [6], [7]], "stream": true}')
        client.may_write.clear()
        task = asyncio.create_task(world.app(scope_of("/v1/completions"), client.receive, client.send))
        await until(lambda: backend.num_open == 3)
        await until(lambda: backend.num_open == 0, within_s=1)
        assert not task.done()
        client.may_write.set()
        await asyncio.wait_for(task, 1)
        return b"".join(message.get("body", b"") for message in client.sent)

    body = asyncio.run(scenario())
    assert b'"lost"' in body
    assert b"[DONE]" not in body


def test_a_fast_reader_gets_everything_through_a_small_buffer():
    backend = ScriptedBackend(lambda *_: [TokenDelta(ids_of("z"), None)] * 500 + saying("end"))
    events = events_of(make_world(backend, stream_buffer_tokens=4).complete(stream=True))
    assert text_of(events) == "z" * 500 + "end"
