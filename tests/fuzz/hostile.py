"""Values and messages of a peer that means ill: nearly right, out of range, of the wrong type, or somebody else's."""

import os
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
QUICK = settings(
    max_examples=int(EXAMPLES or 250),
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
"""The same examples in each run: a change is judged by what it breaks, not by luck. `make fuzz` looks for new ones."""

NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 99, 100, 101, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 53) + 1, -1]
)
NAMES = st.sampled_from(
    [
        "r0",
        "r1",
        "r2",
        "r3",
        "r4",
        "stranger",
        "prefill-1",
        "prefill-2",
        "g1",
        "g2",
        "a" * 128,
        "a" * 129,
        "",
        "a b",
        "\n",
    ]
)
TEXTS = st.sampled_from(
    ["", "float32", "bfloat16", "c0", "w0", "reason", "x" * 2048, "x" * 2049, "\x00\n\x1b[31m", "é" * 9]
)
TREES = st.recursive(
    NUMBERS | NAMES | TEXTS | st.none() | st.booleans() | st.floats(allow_nan=True) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
VALUES = NUMBERS | NAMES | TEXTS | TREES


def tree_of(message: msgspec.Struct) -> dict[str, Any]:
    """A message as the map that crosses the wire."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def spoilt(message: st.SearchStrategy) -> st.SearchStrategy:
    """The trees of messages with nothing, one or two fields replaced, one of these perhaps a field that isn't there."""

    def spoil(tree: dict[str, Any]) -> st.SearchStrategy:
        names = st.sampled_from([*sorted(tree), "surplus"])
        return st.dictionaries(names, VALUES, max_size=2).map(lambda changes: {**tree, **changes})

    return message.map(tree_of).flatmap(spoil)


def frame_of(tree: Any) -> bytes:
    return msgspec.msgpack.encode(tree)


def play(world, steps):
    """A world of the fuzz through its steps, to its end; its own `finish` checks what must hold."""
    for step in steps:
        world.play(list(step))
    world.finish()
    return world
