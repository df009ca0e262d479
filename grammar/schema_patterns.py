"""The regular expressions in a JSON schema, wherever in it they stand."""

from collections.abc import Iterator
from typing import Any, Final

_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Their keys are names, whatever they look like."""
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
"""What stands in them is no schema, whatever it looks like."""


def patterns_of(schema: Any) -> Iterator[str]:
    """Of any JSON, however deep, right or wrong as a schema. Annotations count as schemas: a `$ref` may name them."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left.extend(part)
        elif isinstance(part, dict):
            yield from _patterns_beside(part)
            left.extend(_schemas_in(part))


def _patterns_beside(schema: dict[str, Any]) -> Iterator[str]:
    """Those of this schema itself."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        yield from by_pattern


def _schemas_in(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif keyword not in _DATA:
            yield value
