"""From a grammar as a client writes it to the form that llguidance reads.

| kind        | text                                          | what matches                                        |
|-------------|-----------------------------------------------|-----------------------------------------------------|
| JSON_SCHEMA | a JSON object                                 | JSON that the schema allows                         |
| REGEX       | an expression of Rust's regex, no lookaround  | all of the output                                   |
| CHOICE      | a JSON list of texts                          | one of them                                         |
| LARK        | a grammar in llguidance's kind of Lark        | what its rule `start` derives                       |

Nothing is fetched: a `$ref` to somewhere else is an error.
"""

import json
import re
from typing import TYPE_CHECKING, Final

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from grammar.errors import GrammarError, reason_of
from grammar.schema_patterns import patterns_of
from kvtransfer.request_parts import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_LITERAL_CHARS: Final = 8192
"""Of an expression or a choice. A mask of a literal costs time in proportion to its length: 45 ms for 60,000."""

_EMBEDDED_SCHEMA: Final = re.compile(r"%json\s*")
_JSON: Final = json.JSONDecoder(parse_int=len)  # numbers of any length, of which nothing is asked
_JSON_FORM: "Final[JsonCompileOptions]" = {
    # Between two parts of a value: nothing, a blank, or a line break with indentation. With any whitespace at all a
    # small model may write blanks until max_tokens.
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]?|\n[ ]{0,24}",
    "lenient": False,  # a keyword that is not followed is an error, whatever the schema's own options say
}


def source_of(grammar: Grammar) -> str:
    """What LLMatcher takes. Raises GrammarError for what can be told without compiling."""
    text = _encodable(grammar.text)
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_source(text)
        case GrammarKind.REGEX:
            _check_length("the expression", text)
            _check_end("the expression", text)
            return LLMatcher.grammar_from_regex(text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(f"(?:{re.escape(choice)})" for choice in _choices(text)))
        case GrammarKind.LARK:
            for place in _EMBEDDED_SCHEMA.finditer(text):
                _check_patterns(text, place.end())
            return LLMatcher.grammar_from_lark(text)


def lark_of(text: str) -> str:
    """A grammar in Lark as it is; one in GBNF or EBNF (rules with `::=`) translated. Raises GrammarError."""
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:  # the library's translator raises bare exceptions
        raise GrammarError(reason_of(str(error))) from error
    if len(lark) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"the grammar has {len(lark)} characters as Lark, at most {MAX_GRAMMAR_CHARS} are allowed")
    return lark


def choice_text(choices: list[str]) -> str:
    """Choices as a grammar holds them."""
    return json.dumps(choices, ensure_ascii=False)


def _json_source(text: str) -> str:
    _check_patterns(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_FORM)
    except ValueError as error:
        raise GrammarError(reason_of(str(error))) from error


def _choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise GrammarError("the choices are not a JSON list of texts") from error
    if not choices or not all(choices):
        raise GrammarError("there must be a choice, and none may be empty")
    for choice in choices:
        _check_length("a choice", choice)
    return choices


def _check_length(what: str, text: str) -> None:
    if len(text) > MAX_LITERAL_CHARS:
        raise GrammarError(f"{what} has {len(text)} characters, at most {MAX_LITERAL_CHARS} are allowed")


def _check_patterns(text: str, start: int = 0) -> None:
    """Those of the JSON schema that begins there. If there is none, the library says so."""
    try:
        schema, _ = _JSON.raw_decode(text, start)
    except ValueError:
        return
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    for pattern in patterns_of(schema):
        _check_end("a pattern of the schema", pattern)


def _check_end(what: str, expression: str) -> None:
    """A backslash that escapes nothing is an error, which the library does not see: it leaves it out."""
    num_backslashes = len(expression) - len(expression.rstrip("\\"))
    if num_backslashes % 2:
        raise GrammarError(f"{what} ends with a backslash that escapes nothing")


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError("the text has half of a surrogate pair") from None
    return text
