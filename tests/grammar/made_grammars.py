"""Grammars over the tokenizer of the tiny models, and such as must be refused."""

from functools import cache

from grammar.vocabulary import Vocabulary, digest_of
from kvtransfer.request_parts import Grammar, GrammarKind
from tests.tiny_models import END_OF_TURN_ID, EOS_ID, VOCAB_SIZE, make_tokenizer

JSON, REGEX, CHOICE, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.LARK

BAD = {
    "not JSON": (JSON, '{"type":'),
    "not an object": (JSON, "[1]"),
    "true": (JSON, "true"),
    "no such type": (JSON, '{"type": "strin"}'),
    "unknown keyword": (JSON, '{"not": {"type": "string"}}'),
    "lenient": (JSON, '{"x-guidance": {"lenient": true}, "not": {}}'),
    "false": (JSON, '{"type": "object", "properties": {"a": false}, "required": ["a"]}'),
    "loop": (JSON, '{"$ref": "#"}'),
    "two loop": (JSON, '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
    "remote": (JSON, '{"$ref": "http://127.0.0.1:9/schema.json"}'),
    "file": (JSON, '{"$ref": "file:///etc/passwd"}'),
    "deep": (JSON, '{"type":"array","items":' * 500 + "{}" + "}" * 500),
    "open escape in a pattern": (JSON, r'{"type": "string", "pattern": "a\\"}'),
    "open escape in an inner pattern": (
        JSON,
        r'{"type":"array","items":{"anyOf":[{"type":"string","pattern":"a\\"}]}}',
    ),
    "open escape in a referenced pattern": (JSON, r'{"$ref":"#/more","more":{"type":"string","pattern":"a\\"}}'),
    "open escape of a property": (JSON, r'{"type": "object", "patternProperties": {"a\\": {}}}'),
    "open escape below a property's name": (JSON, r'{"type":"object","properties":{"enum":{"pattern":"a\\"}}}'),
    "open escape in Lark": (LARK, r'start: %json {"type": "string", "pattern": "a\\"} "!"'),
    "half a surrogate": (JSON, '{"const": "\\ud800"}'),
    "unclosed": (REGEX, "(a"),
    "open escape": (REGEX, "a\\"),
    "three backslashes": (REGEX, "\\" * 3),
    "lookahead": (REGEX, "(?=a)b"),
    "reference": (REGEX, r"(a)\1"),
    "nothing": (REGEX, r"[^\x00-\x{10FFFF}]"),
    "long": (REGEX, "a" * 8193),
    "square": (REGEX, "(a{1000}){1000}"),
    "parentheses": (REGEX, "(" * 4000 + "a" + ")" * 4000),
    "stars": (REGEX, "a" + "*" * 8000),
    "no list": (CHOICE, '{"a": 1}'),
    "no choice": (CHOICE, "[]"),
    "empty choice": (CHOICE, '["a", ""]'),
    "numbers": (CHOICE, "[1, 2]"),
    "no start": (LARK, 'foo: "a"'),
    "endless": (LARK, 'start: "a" start'),
    "import": (LARK, '%import /etc/passwd\nstart: "a"'),
    "nested": (LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "many": (LARK, 'start: ("a" "b"){100000}'),
    "unbalanced": (LARK, "}{"),
}
BOMBS = {
    "multiple": (JSON, '{"type": "integer", "multipleOf": 99999989}'),
    "multiple in Lark": (LARK, 'start: %json {"type": "integer", "multipleOf": 99999989}'),
}
"""What the library does not stop by itself."""
GOOD = {
    (JSON, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'): (
        ('{"a":1}', '{"a": -20}', '{\n  "a": 3\n}'),
        ("{}", '{"a":"1"}', '{"a":1,"b":2}', '{   "a":1}', "[1]", '{"a":1} '),
    ),
    (REGEX, r"^[a-c]{2,3}$"): (("ab", "abc"), ("a", "abcd", "xab", "")),
    (REGEX, r"a/b\\"): (("a/b\\",), ("a/b", "a/b/", "a/b\\\\")),
    (JSON, r'{"type":"object","properties":{"pattern":{"enum":["a\\"]}},"required":["pattern"]}'): (
        (r'{"pattern":"a\\"}',),
        ("{}", '{"pattern":"a"}'),
    ),
    (JSON, r'{"enum":[{"pattern":"a\\"}],"default":{"pattern":"a\\"}}'): (
        (r'{"pattern":"a\\"}',),
        ('{"pattern":"a"}',),
    ),
    (JSON, r'{"type":"string","pattern":"^a\\\\$"}'): ((r'"a\\"',), ('"a"',)),
    (CHOICE, '["yes", "no way", "é😀", "a\\"b\\\\", "x\\ny", "(", "$^"]'): (
        ("yes", "no way", "é😀", 'a"b\\', "x\ny", "(", "$^"),
        ("ye", "no", "yes ", "no way!"),
    ),
    (LARK, 'start: "(" start ")" | "x"'): (("x", "((x))"), ("(x", "x)", "()")),
    (LARK, 'start: %json {"type": "boolean"} "!"'): (("true!",), ("true", "1!")),
}
"""Grammars to texts that match and texts that don't."""


@cache
def tokenizer_json() -> str:
    return make_tokenizer().backend_tokenizer.to_str()


@cache
def vocabulary(num_ids: int = VOCAB_SIZE) -> Vocabulary:
    return Vocabulary(tokenizer_json(), num_ids, (EOS_ID, END_OF_TURN_ID))


@cache
def digest() -> str:
    return digest_of(make_tokenizer().backend_tokenizer)


def grammar(kind: GrammarKind, text: str) -> Grammar:
    return Grammar(kind, text, digest())


def regex(text: str) -> Grammar:
    return grammar(REGEX, text)
