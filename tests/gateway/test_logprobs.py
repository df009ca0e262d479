"""Log probabilities, echo and truncation in answers: shapes, texts and places of tokens, whole and streamed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backend import TokenDelta
from gateway.echo import echo_of
from gateway.token_texts import TokenTexts
from gateway.tokenizer import Tokenizer
from kvtransfer.request_parts import MAX_PROMPT_LOGPROBS, EndReason, TokenLogprob
from tests.gateway.http_world import (
    NUM_IDS,
    ScriptedBackend,
    events_of,
    ids_of,
    make_world,
    text_of,
    tokenizer_of_world,
)

PROMPT = ids_of("hello")
THUMB = "👍"
TEXTS = TokenTexts(tokenizer_of_world())


def told(token_id: int, num_top: int, rank: int = 2) -> TokenLogprob:
    """What a worker might say of a token: alternatives from the letter a on, the token itself not among them."""
    top = tuple((other, -0.1 * (place + 1)) for place, other in enumerate(ids_of("abcdefgh")[:num_top]))
    return TokenLogprob(-token_id / 1000, rank, top)


def answering(text, finish=EndReason.LENGTH, step=1) -> ScriptedBackend:
    """Says `text`, `step` tokens a delta, with what is asked for; STOP has the end-of-turn token behind it."""

    def script(prompt, sampling):
        ids = ids_of(text) + (ids_of("<|im_end|>") if finish is EndReason.STOP else ())
        ids = ids[: sampling.max_tokens]
        scores = None
        if sampling.num_prompt_logprobs is not None:
            scores = tuple(told(token, sampling.num_prompt_logprobs) for token in prompt[1:])
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            likely = () if sampling.num_logprobs is None else tuple(told(i, sampling.num_logprobs) for i in part)
            is_last = start + step >= len(ids)
            yield TokenDelta(part, finish if is_last else None, 0, likely, scores if start == 0 else None)

    return ScriptedBackend(script)


def choice_of(text="hello world", finish=EndReason.LENGTH, **fields):
    response = make_world(answering(text, finish)).complete(**fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


# --- completions -------------------------------------------------------------------------------------


def test_a_completion_s_four_lists():
    ids = ids_of("hello world")
    choice = choice_of(logprobs=2)
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "hello world"
    assert logprobs["token_logprobs"] == [-token / 1000 for token in ids]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:place])) for place in range(len(ids))]
    for token, name, top in zip(ids, logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top == {"a": -0.1, "b": -0.2, name: -token / 1000}, "two alternatives, and the token itself"
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("asked", [None, False])
def test_who_does_not_ask_is_told_nothing(asked):
    world = make_world()
    assert world.complete(logprobs=asked).json()["choices"][0]["logprobs"] is None
    assert world.backend.calls[0][1].num_logprobs is None


def test_no_alternatives_leave_the_token_itself():
    logprobs = choice_of("a", logprobs=0)["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -ids_of("a")[0] / 1000}]


def test_parts_of_a_character_are_told_apart_and_begin_where_it_does():
    choice = choice_of(f"a{THUMB}b", logprobs=1)
    logprobs = choice["logprobs"]
    assert choice["text"] == f"a{THUMB}b"
    parts = [f"bytes:\\x{byte:02x}" for byte in THUMB.encode()]
    assert logprobs["tokens"] == ["a", *parts, "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_tokens_can_be_called_by_their_ids():
    logprobs = choice_of("ab", logprobs=1, return_tokens_as_token_ids=True)["logprobs"]
    first, second = (f"token_id:{token}" for token in ids_of("ab"))
    assert logprobs["tokens"] == [first, second]
    assert [set(top) for top in logprobs["top_logprobs"]] == [{first}, {first, second}]


def test_the_token_that_ends_is_told_but_not_in_the_text():
    choice = choice_of("ab", EndReason.STOP, logprobs=0)
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_a_stop_string_cuts_the_tokens_with_the_text():
    """A token that begins before the cut is shown, as its text is in part; what begins behind it is not."""
    text = "the dog zqzqz"
    pieces = [TEXTS.text(token) for token in ids_of(text)]
    for stop in ("z", "zqz", "og z", " dog", "the"):
        choice = choice_of(text, logprobs=0, stop=stop)
        cut = text.index(stop)
        assert choice["text"] == text[:cut]
        starts = [len("".join(pieces[:place])) for place in range(len(pieces))]
        assert choice["logprobs"]["text_offset"] == [start for start in starts if start < cut]
        choice = choice_of(text, logprobs=0, stop=stop, include_stop_str_in_output=True)
        shown = cut + len(stop)
        assert choice["logprobs"]["text_offset"] == [start for start in starts if start < shown]


# --- chats -------------------------------------------------------------------------------------------


def test_a_chat_s_list():
    response = make_world(answering("a👍", EndReason.STOP)).chat(logprobs=True, top_logprobs=2)
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == "a👍"
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert len(content) == response.json()["usage"]["completion_tokens"] == 6
    first = content[0]
    assert (first["token"], first["bytes"]) == ("a", [97])
    assert first["logprob"] == -ids_of("a")[0] / 1000
    assert first["top_logprobs"] == [
        {"token": "a", "logprob": -0.1, "bytes": [97]},
        {"token": "b", "logprob": -0.2, "bytes": [98]},
    ]
    assert bytes(byte for entry in content[1:5] for byte in entry["bytes"]) == THUMB.encode()
    assert [entry["token"] for entry in content[1:5]] == ["\ufffd"] * 4
    assert content[5]["token"] == "<|im_end|>"


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}])
def test_a_chat_without_alternatives(fields):
    content = make_world(answering("ab")).chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_a_chat_that_does_not_ask():
    world = make_world(answering("ab"))
    assert world.chat(logprobs=False, top_logprobs=0).json()["choices"][0]["logprobs"] is None
    assert world.backend.calls[0][1].num_logprobs is None


# --- streams -----------------------------------------------------------------------------------------

ANY_IDS = st.lists(st.sampled_from([*range(3, 259), *ids_of("stop the dog 👍 日本<s>")]), min_size=1, max_size=12)


def gathered(events, index=0):
    """The four lists of all chunks of a completion, joined."""
    lists: dict[str, list] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index and choice["logprobs"] is not None:
                for name, values in choice["logprobs"].items():
                    lists[name] += values
    return lists


@settings(max_examples=80, deadline=None)
@given(
    ANY_IDS,
    st.integers(1, 3),
    st.lists(st.sampled_from(["s", "sto", "op", "👍", " the", "ab"]), max_size=2),
    st.sampled_from([EndReason.STOP, EndReason.LENGTH]),
    st.fixed_dictionaries(
        {"echo": st.booleans(), "include_stop_str_in_output": st.booleans(), "skip_special_tokens": st.booleans()}
    ),
)
def test_a_stream_says_what_the_whole_answer_says(ids, step, stops, finish, fields):
    """Also: offsets go up, and what a token begins in is shown."""
    likely = tuple(told(token, 1) for token in ids)
    starts = range(0, len(ids), step)
    scores = tuple(told(token, 1) for token in PROMPT[1:]) if fields["echo"] else None
    steps = [
        TokenDelta(
            tuple(ids[start : start + step]),
            finish if start == starts[-1] else None,
            0,
            likely[start : start + step],
            scores if start == 0 else None,
        )
        for start in starts
    ]
    world = make_world(ScriptedBackend(lambda *_: steps))
    fields = {"logprobs": 1, "stop": stops, **fields}
    whole = world.complete(**fields).json()["choices"][0]
    events = events_of(world.complete(**fields, stream=True))
    assert text_of(events) == whole["text"]
    assert gathered(events) == whole["logprobs"]
    offsets = whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert all(offset <= len(whole["text"]) for offset in offsets)
    num_prompt = len(PROMPT) * fields["echo"]
    told_ones = whole["logprobs"]["token_logprobs"][num_prompt:]
    assert told_ones == [logprob.logprob for logprob in likely[: len(told_ones)]]
    if not stops:
        assert len(told_ones) == len(ids)


def test_a_streamed_chat_tells_each_token_with_its_text():
    events = events_of(make_world(answering("a👍b", EndReason.STOP)).chat(stream=True, logprobs=True, top_logprobs=1))
    seen = []
    for event in events[1:-1]:
        (choice,) = event["choices"]
        entries = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
        seen.append((choice["delta"].get("content", ""), b"".join(bytes(entry["bytes"]) for entry in entries)))
    assert seen == [("a", b"a"), (THUMB, THUMB.encode()), ("b", b"b"), ("", b"<|im_end|>")]


# --- the prompt --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_s_tokens_as_vllm_tells_them(stream):
    world = make_world(answering("ab"))
    response = world.complete(prompt=[5, 6, 7], prompt_logprobs=2, stream=stream)
    assert world.backend.calls[0][1].num_prompt_logprobs == 2
    if stream:
        chunks = [event["choices"][0] for event in events_of(response)[:-1]]
        assert ["prompt_logprobs" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        choice = chunks[0]
    else:
        choice = response.json()["choices"][0]
    nothing, second, third = choice["prompt_logprobs"]
    assert nothing is None
    a, b = ids_of("ab")
    assert second == {
        "6": {"logprob": -0.006, "rank": 2, "decoded_token": TEXTS.text(6)},
        str(a): {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        str(b): {"logprob": -0.2, "rank": 2, "decoded_token": "b"},
    }
    assert next(iter(third)) == "7"
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_s_prompt_stands_beside_its_choices(stream):
    world = make_world(answering("ab"))
    response = world.chat(prompt_logprobs=0, stream=stream)
    prompt = world.backend.calls[0][0]
    bodies = events_of(response)[:-1] if stream else [response.json()]
    (scores,) = [body["prompt_logprobs"] for body in bodies if "prompt_logprobs" in body]
    assert scores[0] is None
    assert [list(entry) for entry in scores[1:]] == [[str(token)] for token in prompt[1:]]


def test_each_choice_has_its_own_prompt_s():
    world = make_world(answering("ab"))
    choices = world.complete(prompt=[[5, 6], [7]], prompt_logprobs=0).json()["choices"]
    assert [[entry and list(entry) for entry in choice["prompt_logprobs"]] for choice in choices] == [
        [None, ["6"]],
        [None],
    ]


# --- echo --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_comes_before_the_output(stream):
    world = make_world(answering("ab"))
    response = world.complete(prompt="hello", echo=True, stream=stream)
    text = text_of(events_of(response)) if stream else response.json()["choices"][0]["text"]
    assert text == "helloab"
    assert world.backend.calls[0][1].num_prompt_logprobs is None


def test_stop_strings_are_not_looked_for_in_an_echo():
    assert choice_of("lolo", prompt="hello", echo=True, stop="lo")["text"] == "hello"


def test_an_echo_with_log_probabilities_tells_of_both():
    world = make_world(answering("ab"))
    choice = world.complete(prompt="hello", echo=True, logprobs=1).json()["choices"][0]
    sampling = world.backend.calls[0][1]
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (1, 1)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "helloab"
    assert logprobs["token_logprobs"] == [None, *(-token / 1000 for token in (*PROMPT[1:], *ids_of("ab")))]
    assert logprobs["top_logprobs"][0] is None
    assert [
        choice["text"][offset:][: len(name)]
        for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == logprobs["tokens"]
    assert "prompt_logprobs" not in choice


def test_more_alternatives_for_the_prompt_than_for_its_echo():
    choice = choice_of("ab", prompt=[5, 6], echo=True, logprobs=1, prompt_logprobs=3)
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert len(choice["prompt_logprobs"][1]) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", [EndReason.STOP, EndReason.LENGTH])
def test_nothing_but_the_prompt(stream, finish):
    """As evaluations send it; the token that comes with the prompt's computation is dropped."""
    world = make_world(answering("zq", finish))
    fields = {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = world.complete(**fields, **options)
    assert world.backend.calls[0][1].max_tokens == 1
    if stream:
        events = events_of(response)
        usage, choice = events[-2]["usage"], {"text": text_of(events), "logprobs": gathered(events)}
        assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == ["length"]
    else:
        usage, choice = response.json()["usage"], response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
    assert choice["text"] == "hello"
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 0)
    assert world.backend.num_open == 0


def test_special_tokens_of_a_prompt_of_ids_are_shown_in_its_echo():
    prompt = [*ids_of("<s>"), *ids_of("hi")]
    choice = choice_of("a", prompt=prompt, echo=True, logprobs=0)
    assert choice["text"] == "<s>hia"
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5]


def test_what_the_tokenizer_adds_is_not_in_the_text():
    class Adding(Tokenizer):
        def encode(self, text, *, add_special_tokens):
            return [*ids_of("<s>"), *super().encode(text, add_special_tokens=False)]

    tokenizer = Adding(tokenizer_of_world()._hf)
    ids = tokenizer.encode("hi", add_special_tokens=True)
    assert echo_of(tokenizer, ids, "hi", with_offsets=True).offsets == (0, 0, 1)
    assert echo_of(tokenizer, ids, None, with_offsets=True).offsets == (0, 3, 4)
    assert echo_of(tokenizer, ids, None, with_offsets=False).text == "<s>hi"


@given(st.text(max_size=12))
def test_an_echo_s_offsets_are_where_tokens_begin(text):
    ids = ids_of(text)
    echo = echo_of(tokenizer_of_world(), ids, text, with_offsets=True)
    assert echo.text == text
    raw, start = text.encode(), 0
    for token, offset in zip(ids, echo.offsets, strict=True):
        assert offset == len(raw[:start].decode(errors="ignore"))
        start += len(TEXTS.utf8(token))


# --- tokens by themselves ----------------------------------------------------------------------------


def test_every_token_has_its_bytes():
    for token in range(NUM_IDS):
        text, utf8 = TEXTS.text(token), TEXTS.utf8(token)
        assert utf8.decode(errors="replace") == text
        assert TEXTS.name(token) == text or TEXTS.name(token).startswith("bytes:\\x")
    assert len({TEXTS.name(token) for token in range(NUM_IDS)}) == NUM_IDS
    assert {TEXTS.utf8(token) for token in range(NUM_IDS)} >= {bytes([byte]) for byte in range(256)}
    assert (TEXTS.text(NUM_IDS + 5), TEXTS.utf8(NUM_IDS + 5)) == ("", b"")


# --- truncation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "fields", "kept"),
    [
        (3, {}, 3),
        (1, {}, 1),
        (90, {"max_tokens": 5}, 90),
        (100, {}, 80),
        (-1, {"max_tokens": 30}, 70),
        (-1, {}, 80),
        (-1, {"max_tokens": 99}, 1),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept(asked, fields, kept):
    prompt = [5 + index % 50 for index in range(80)]
    world = make_world()
    response = world.complete(prompt=prompt, truncate_prompt_tokens=asked, **fields)
    if asked == 90:
        prompt, response = prompt * 2, world.complete(prompt=prompt * 2, truncate_prompt_tokens=asked, **fields)
    assert response.status_code == 200, response.text
    assert world.backend.calls[-1][0] == tuple(prompt[-kept:])
    assert response.json()["usage"]["prompt_tokens"] == kept


def test_a_text_that_is_far_too_long_can_be_truncated():
    world = make_world()
    assert world.complete(prompt="hello " * 5000, truncate_prompt_tokens=4).status_code == 200
    assert world.backend.calls[0][0] == ids_of("hello " * 5000)[-4:]
    assert world.chat(truncate_prompt_tokens=2).json()["usage"]["prompt_tokens"] == 2


def test_an_echo_is_of_what_was_kept():
    choice = choice_of("a", prompt="hello", echo=True, truncate_prompt_tokens=1, logprobs=0)
    last = TEXTS.text(PROMPT[-1])
    assert choice["text"] == last + "a"
    assert choice["logprobs"]["text_offset"] == [0, len(last)]


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1.0}, "logprobs"),
        ({"logprobs": "5"}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 100, "prompt": [5] * 100}, None),
        ({"truncate_prompt_tokens": 2, "prompt": [5, 6, NUM_IDS]}, "prompt"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ],
)
def test_completions_are_refused(fields, param):
    world = make_world()
    response = world.complete(**fields)
    assert (response.status_code, world.backend.calls) == (400, [])
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_chats_are_refused(fields, param):
    world = make_world()
    response = world.chat(**fields)
    assert (response.status_code, world.backend.calls) == (400, [])
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "echo")]
)
def test_too_many_for_one_answer_are_refused_over_all_prompts(fields, param):
    most = MAX_PROMPT_LOGPROBS // 21
    world = make_world(ScriptedBackend(max_model_len=MAX_PROMPT_LOGPROBS))
    response = world.complete(prompt=[[5] * (most // 2 + 1)] * 2, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert str(MAX_PROMPT_LOGPROBS) in response.json()["error"]["message"]
    assert world.backend.calls == []
