"""What form a request wants its output to have, whichever of the fields says so. Compiles nothing.

| field                                                      | grammar                                            |
|------------------------------------------------------------|----------------------------------------------------|
| `response_format` json_object                              | any JSON object                                    |
| `response_format` json_schema, `guided_json`               | JSON by the schema                                 |
| `guided_regex`, `guided_choice`, `guided_grammar`          | as they say                                        |
| `structured_outputs` json, json_object, regex, choice, grammar | the same, in vLLM's newer way                  |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.errors import InvalidFieldError
from gateway.field_rules import FORMAT_RULES, STRUCTURE_RULES
from gateway.schemas import GenerationRequest, ResponseFormat, StructuredOutputs
from gateway.validation import convert_at
from grammar.source import choice_text
from kvtransfer.request_parts import MAX_GRAMMAR_CHARS, GrammarKind

_ANY_OBJECT: Final = '{"type":"object"}'


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar as the client wrote it; `field` is where."""

    field: str
    kind: GrammarKind
    text: str


def asked_grammar(request: GenerationRequest) -> AskedGrammar | None:
    """The one that a request asks for, if any. Raises InvalidFieldError."""
    found = list(_all_asked(request))
    if len(found) > 1:
        raise InvalidFieldError(f"{found[1].field}: contradicts {found[0].field}; send one", param=found[1].field)
    if not found:
        return None
    (asked,) = found
    if not asked.text:
        raise InvalidFieldError(f"{asked.field}: must not be empty", param=asked.field)
    if len(asked.text) > MAX_GRAMMAR_CHARS:
        raise InvalidFieldError(
            f"{asked.field}: {len(asked.text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed", param=asked.field
        )
    if request.ignore_eos:
        raise InvalidFieldError(
            f"ignore_eos: does not go with {asked.field}, whose output has an end", param="ignore_eos"
        )
    return asked


def _all_asked(request: GenerationRequest) -> Iterator[AskedGrammar]:
    if request.response_format is not None:
        yield from _of_format(request.response_format)
    guided: dict[str, Any] = {"json": request.guided_json, "regex": request.guided_regex}
    guided |= {"choice": request.guided_choice, "grammar": request.guided_grammar}
    yield from _of_parts({f"guided_{name}": (name, value) for name, value in guided.items()})
    if request.structured_outputs is not None:
        where = "structured_outputs"
        asked = convert_at(where, request.structured_outputs, StructuredOutputs, STRUCTURE_RULES)
        parts = {name: getattr(asked, name) for name in ("json", "regex", "choice", "grammar")}
        parts["json_object"] = asked.json_object or None
        found = list(_of_parts({f"{where}.{name}": (name, value) for name, value in parts.items()}))
        if not found:
            raise InvalidFieldError(f"{where}: asks for nothing", param=where)
        yield from found


def _of_parts(parts: dict[str, tuple[str, Any]]) -> Iterator[AskedGrammar]:
    """Of each field that is set: its place to (what it is, its value)."""
    for field, (name, value) in parts.items():
        if value is None:
            continue
        match name:
            case "json":
                yield AskedGrammar(field, GrammarKind.JSON_SCHEMA, _schema_text(value))
            case "json_object":
                yield AskedGrammar(field, GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
            case "regex":
                yield AskedGrammar(field, GrammarKind.REGEX, value)
            case "choice":
                yield AskedGrammar(field, GrammarKind.CHOICE, choice_text(value))
            case "grammar":
                yield AskedGrammar(field, GrammarKind.LARK, value)


def _of_format(fields: dict[str, Any]) -> Iterator[AskedGrammar]:
    where = "response_format"
    form = convert_at(where, fields, ResponseFormat, FORMAT_RULES)
    if (form.json_schema is not None) != (form.type == "json_schema"):
        raise InvalidFieldError(f"{where}.json_schema: goes with type json_schema, and that needs it", param=where)
    if form.json_schema is not None:
        text = _schema_text(form.json_schema.schema)
        yield AskedGrammar(f"{where}.json_schema.schema", GrammarKind.JSON_SCHEMA, text)
    elif form.type == "json_object":
        yield AskedGrammar(where, GrammarKind.JSON_SCHEMA, _ANY_OBJECT)


def _schema_text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
