"""Puts a bug into the real code, and takes it out again.

A mutation is a text replaced in the source of one function. The function's code object is swapped, so everybody who has
imported it runs the bug. Where the text is not there exactly once, the code has moved on and the list must follow.
"""

import inspect
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Mutation:
    """In `target` ("module:Qualified.name") `old` becomes `new`. `bug` says in words what is wrong then."""

    name: str
    bug: str
    target: str
    old: str
    new: str


class StaleMutationError(Exception):
    """The code that a mutation changes is not there any more: the lists beside `mutants.py` have to follow."""


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The bug is in the code meanwhile. Raises StaleMutationError."""
    function = function_of(mutation)
    sound = function.__code__
    function.__code__ = mutated_code(mutation)
    try:
        yield
    finally:
        function.__code__ = sound


def function_of(mutation: Mutation) -> types.FunctionType:
    module_name, _, path = mutation.target.partition(":")
    found = import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise StaleMutationError(f"{mutation.name}: {mutation.target} does not exist")
        found = getattr(found, name)
    function = found.fget if isinstance(found, property) else inspect.unwrap(found)
    return getattr(function, "__func__", function)


def mutated_code(mutation: Mutation) -> types.CodeType:
    function = function_of(mutation)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutation.old) != 1:
        raise StaleMutationError(f"{mutation.name}: {mutation.old!r} is in {mutation.target} not exactly once")
    module = compile(source.replace(mutation.old, mutation.new), mutation.target, "exec")
    return next(
        code
        for code in module.co_consts
        if isinstance(code, types.CodeType) and code.co_name == function.__code__.co_name
    )
