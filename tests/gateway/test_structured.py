"""Fields that give an output its form: what workers are told, and what is a 400 before any of them hears of it."""

import asyncio
import json
import time

import pytest

from grammar.child import Child, ChildLostError, Death
from kvtransfer.request_parts import GrammarKind
from tests.gateway.http_world import NUM_IDS, ids_of, make_world, tokenizer_of_world
from tests.grammar.made_grammars import BAD, BOMBS, CHOICE, JSON, LARK, REGEX

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
FIELD_OF = {JSON: "guided_json", REGEX: "guided_regex", LARK: "guided_grammar"}


@pytest.fixture(scope="module")
def world():
    return make_world()


def told(world, response):
    assert response.status_code == 200, response.text
    return world.backend.calls[-1][1]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, JSON, '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, JSON, TEXT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"},
                }
            },
            JSON,
            TEXT,
        ),
        ({"guided_json": SCHEMA}, JSON, TEXT),
        ({"guided_json": json.dumps(SCHEMA)}, JSON, json.dumps(SCHEMA)),
        ({"guided_regex": "[a-z]+"}, REGEX, "[a-z]+"),
        ({"guided_choice": ["yes", "né"]}, CHOICE, '["yes", "né"]'),
        ({"guided_grammar": 'start: "a"'}, LARK, 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, JSON, TEXT),
        ({"structured_outputs": {"json_object": True}}, JSON, '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a"}}, REGEX, "a"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE, '["a", "b"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, LARK, 'start: "a"'),
    ],
)
@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_what_workers_are_told(world, endpoint, fields, kind, text):
    grammar = told(world, getattr(world, endpoint)(**fields)).grammar
    assert (grammar.kind, grammar.text) == (kind, text)
    assert grammar.vocabulary == tokenizer_of_world().vocabulary_digest


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_no_form_is_no_grammar(world, fields):
    sampling = told(world, world.complete(**fields))
    assert (sampling.grammar, sampling.bad_words, sampling.allowed_token_ids) == (None, (), ())


def test_gbnf_goes_out_as_lark(world):
    grammar = told(world, world.complete(guided_grammar='root ::= "a" | "b"')).grammar
    assert grammar.kind is GrammarKind.LARK
    assert "::=" not in grammar.text


def refused(world, response, param):
    before = len(world.backend.calls)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert len(response.content) < 1000
    assert len(world.backend.calls) == before
    return error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n", "schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.more"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["x" * 8193]}, "guided_choice"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["w"] * 129}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [NUM_IDS]}, "allowed_token_ids"),
        ({"tools": [{"type": "function"}], "messages": [{"role": "user", "content": "a"}]}, "tools"),
    ],
)
def test_what_is_refused_without_compiling(world, fields, param):
    if "tools" in fields:
        refused(world, world.post("/v1/chat/completions", fields), param)
    else:
        refused(world, world.complete(**fields), param)


@pytest.mark.parametrize("name", [name for name in BAD if BAD[name][0] in FIELD_OF])
def test_bad_grammars_are_a_400(world, name):
    kind, text = BAD[name]
    message = refused(world, world.complete(**{FIELD_OF[kind]: text}), FIELD_OF[kind])
    assert message.startswith(f"{FIELD_OF[kind]}: ")


def test_a_bomb_is_a_400_and_holds_up_nobody(world):
    """Meanwhile plain requests are answered; the second time the verdict is known."""
    kind, text = BOMBS["multiple"]
    body = {"model": "tiny", "prompt": "hello", FIELD_OF[kind]: text}

    async def scenario():
        async with world.client() as client:
            bomb = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.1)
            longest = 0.0
            while not bomb.done():
                start = time.monotonic()
                answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
                assert answer.status_code == 200
                longest = max(longest, time.monotonic() - start)
                await asyncio.sleep(0.05)
            start = time.monotonic()
            again = await client.post("/v1/completions", json=body)
            return await bomb, longest, again, time.monotonic() - start

    first, longest, again, seconds = asyncio.run(scenario())
    for response in (first, again):
        assert "too much memory" in refused(world, response, "guided_json")
    assert longest < 1.0
    assert seconds < 1.0


@pytest.mark.parametrize(
    ("death", "reason"), [(Death.OVERDUE, "not compiled within"), (Death.FOREIGN, "was killed")], ids=str
)
def test_a_verdict_that_was_not_reached_is_the_servers_fault_and_not_kept(world, monkeypatch, death, reason):
    def ask(child, *_):
        child.end()
        raise ChildLostError(death)

    monkeypatch.setattr(Child, "ask", ask)
    before = len(world.backend.calls)
    wanted = f"[x-z]{{7}}|{death.value}"
    response = world.complete(guided_regex=wanted)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["type"] == "service_unavailable"
    assert reason in response.json()["error"]["message"]
    assert len(world.backend.calls) == before
    monkeypatch.undo()
    assert told(world, world.complete(guided_regex=wanted)).grammar.text == wanted


def test_bad_words_are_token_ids_at_the_beginning_and_behind_a_blank(world):
    sampling = told(world, world.complete(bad_words=["hello", "  fox", "hello"]))
    assert sampling.bad_words == (ids_of("hello"), ids_of(" hello"), ids_of("fox"), ids_of(" fox"))


def test_allowed_token_ids_go_out_as_they_are(world):
    assert told(world, world.complete(allowed_token_ids=[5, 3, NUM_IDS - 1])).allowed_token_ids == (5, 3, NUM_IDS - 1)


def test_a_reader_of_a_surrogate_gets_no_500(world):
    body = b'{"model": "tiny", "prompt": "a", "guided_json": {"const": "\\ud800"}}'
    response = world.post("/v1/completions", None, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
