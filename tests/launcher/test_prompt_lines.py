"""Input lines of `kvsplice generate`: what is wrong is named by its line, and digests cover what decides."""

import io
import json

import pytest

from launcher.errors import LineError
from launcher.prompt_lines import MAX_LINE_BYTES, LineDefaults, open_lines, parse_line, read_lines

DEFAULTS = LineDefaults({"max_tokens": 8, "temperature": 0.5}, seed=3, engine={"model": "tiny"})


def parse(fields, number=1, defaults=DEFAULTS):
    return parse_line(number, json.dumps(fields).encode(), defaults)


def test_a_line_beats_the_defaults():
    line = parse({"prompt": "a", "temperature": 0, "stop": ["x"], "custom_id": "one"})
    assert (line.prompt, line.messages, line.custom_id) == ("a", None, "one")
    assert (line.params.max_tokens, line.params.temperature, line.params.stops) == (8, 0.0, ("x",))


def test_seeds_differ_by_line_and_run_and_stay():
    seeds = [parse({"prompt": "a"}, number).params.seed for number in range(1, 50)]
    assert len(set(seeds)) == 49
    assert seeds == [parse({"prompt": "b"}, number).params.seed for number in range(1, 50)]
    other = LineDefaults(DEFAULTS.sampling, seed=4, engine=DEFAULTS.engine)
    assert parse({"prompt": "a"}, 1, other).params.seed not in seeds
    assert parse({"prompt": "a", "seed": 7}, 9).params.seed == 7


def test_the_digest_covers_all_that_decides():
    base = parse({"prompt": "a"}).digest
    assert parse({"prompt": "a"}).digest == base
    assert parse({"temperature": 0.5, "prompt": "a"}).digest == base  # said or not, it is the same
    others = [
        parse({"prompt": "b"}),
        parse({"prompt": "a"}, number=2),
        parse({"prompt": "a", "top_k": 5}),
        parse({"prompt": "a", "custom_id": "x"}),
        parse({"messages": [{"role": "user", "content": "a"}]}),
        parse({"prompt": "a"}, defaults=LineDefaults({"max_tokens": 9, "temperature": 0.5}, 3, {"model": "tiny"})),
        parse({"prompt": "a"}, defaults=LineDefaults(DEFAULTS.sampling, 4, {"model": "tiny"})),
        parse({"prompt": "a"}, defaults=LineDefaults(DEFAULTS.sampling, 3, {"model": "other"})),
    ]
    assert len({base, *(other.digest for other in others)}) == 9


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"[1]", "is no JSON object"),
        (b'{"prompt": ', "is not valid JSON"),
        (b'{"prompt": "\xff"}', "is not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "is not valid JSON"),
        (b"{}", 'needs either "prompt" or "messages"'),
        (b'{"prompt": "a", "messages": []}', 'needs either "prompt" or "messages"'),
        (b'{"prompt": "a", "max_token": 5}', "'max_token': unknown sampling field"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens: Expected int >= 1"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens: Expected int"),
        (b'{"prompt": "a", "custom_id": 5}', "custom_id: must be text"),
        (b'{"prompt": "a", "n": 2}', "'n': unknown"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(line, says):
    file = io.BytesIO(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(LineError, match="line 3 of the input: ") as raised:
        list(read_lines(file, DEFAULTS))
    assert says in str(raised.value)


def test_empty_lines_count_and_say_nothing():
    file = io.BytesIO(b'\n{"prompt": "a"}\n  \n{"prompt": "b"}')
    assert [(line.number, line.prompt) for line in read_lines(file, DEFAULTS)] == [(2, "a"), (4, "b")]
    assert [line.number for line in read_lines(file, DEFAULTS)] == [2, 4]  # from the beginning again


def test_a_line_without_end_is_not_read_whole(monkeypatch):
    monkeypatch.setattr("launcher.prompt_lines.MAX_LINE_BYTES", 100)
    with pytest.raises(LineError, match="line 1 of the input: is longer than 100 bytes"):
        list(read_lines(io.BytesIO(b"x" * 1000), DEFAULTS))
    assert MAX_LINE_BYTES >= 1 << 20


def test_what_can_be_read_only_once_is_copied(monkeypatch):
    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    class Stdin:
        buffer = Pipe(b'{"prompt": "a"}\n')

    monkeypatch.setattr("sys.stdin", Stdin)
    with open_lines("-") as file:
        assert [line.prompt for line in read_lines(file, DEFAULTS)] == ["a"]
        assert [line.prompt for line in read_lines(file, DEFAULTS)] == ["a"]
