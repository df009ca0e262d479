"""From the bytes of a body to a checked request, or to a 400 that names the field.

    body --parse_object--> fields --known_fields--> fields of the request --convert--> frozen request

Strict: an integer is not `true`, `2.0` or `"7"`; NaN, Infinity, numbers out of range and lone surrogates are no JSON.
Nothing is accepted and ignored: a field is ours, or tolerated because it can't change the answer, or known and left at
the value that asks for nothing; everything else is refused. `null` means that a field is absent.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from gateway.errors import InvalidFieldError, excerpt

_T = TypeVar("_T")

MAX_BRACKETS: Final = 50_000
"""Brackets in a body, also in its texts. Each may be an object in memory; millions of them would hold up everybody."""

_AT_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)


@dataclass(frozen=True)
class FieldRules:
    """The fields of an endpoint that are not in its request type.

    `tolerated`: dropped, whatever their value. `unsupported`: features that are not built, with the values that don't
    ask for them.
    """

    tolerated: Set[str]
    unsupported: Mapping[str, tuple[Any, ...]]


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidFieldError."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise InvalidFieldError("the body has too many arrays and objects")
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        if "out of range" in str(error):  # of a float64, or of the digits that Python takes for an integer
            raise _out_of_range(body) from None
        raise InvalidFieldError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidFieldError("the body is not valid JSON") from None
    except RecursionError:
        raise InvalidFieldError("the JSON of the body is nested too deeply") from None
    return fields


def known_fields(fields: Mapping[str, Any], request_type: type, rules: FieldRules, where: str = "") -> dict[str, Any]:
    """The fields that `request_type` has, without nulls. `where` is put before names in messages.

    Raises InvalidFieldError for unknown fields and for features that are not built.
    """
    own = frozenset(request_type.__struct_fields__)  # type: ignore[attr-defined]  # of msgspec.Struct
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in own:
            if value is not None:
                kept[name] = value
        elif name not in rules.tolerated:
            _check_unsupported(name, value, rules, where)
    return kept


def convert(fields: Mapping[str, Any], request_type: type[_T]) -> _T:
    """`fields` as a `request_type`. Raises InvalidFieldError that names field, type and range."""
    try:
        return msgspec.convert(fields, request_type, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None


def convert_at(where: str, fields: Mapping[str, Any], kind: type[_T], rules: FieldRules) -> _T:
    """`fields`, a part of a request, as a `kind`. Raises InvalidFieldError with the part's place in front."""
    known = known_fields(fields, kind, rules, f"{where}.")
    try:
        return convert(known, kind)
    except InvalidFieldError as error:
        param = where if error.param is None else f"{where}.{error.param}"
        raise InvalidFieldError(f"{where}: {error}", param=param) from None


def _check_unsupported(name: str, value: Any, rules: FieldRules, where: str) -> None:
    shown = where + excerpt(name)
    if name not in rules.unsupported:
        raise InvalidFieldError(f"{shown}: unknown field", param=shown)
    if value is not None and not any(_is_same(value, neutral) for neutral in rules.unsupported[name]):
        raise InvalidFieldError(f"{shown}: not supported by this server; leave it out", param=shown)


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal and of the same type: in Python, True == 1."""
    return type(value) is type(neutral) and value == neutral


def _invalid_field(message: str) -> InvalidFieldError:
    """msgspec's message with the field in front. It holds types, bounds and places, and of the client's only
    names of unknown fields and of choices that there are not."""
    match = _AT_PATH.match(message)
    assert match is not None, f"the pattern takes any text, but not {message!r}"
    what = match["what"].replace("`", "")
    if what.startswith(("Object contains unknown field ", "Invalid enum value ")):
        what = excerpt(what)
    if not match["path"]:
        missing = re.match(r"Object missing required field (\w+)", what)
        return InvalidFieldError(what, param=missing[1] if missing else None)
    place = f"a key of {match['path']}" if match["key"] else match["path"]
    return InvalidFieldError(f"{place}: {what[0].lower()}{what[1:]}", param=match["path"])


def _out_of_range(body: bytes) -> InvalidFieldError:
    """Names the first top-level field that holds a number beyond the range of a double, if the rest is JSON."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        name = next((name for name, raw in fields.items() if not _is_in_range(raw)), None)
    except (msgspec.DecodeError, RecursionError):
        name = None
    if name is None:
        return InvalidFieldError("a number is out of the range of a double")
    return InvalidFieldError(f"{excerpt(name)}: a number is out of the range of a double", param=excerpt(name))


def _is_in_range(raw: msgspec.Raw) -> bool:
    try:
        msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return False
    return True
