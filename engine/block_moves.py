"""Whole blocks that have to move before the next step: what a scheduler decides and an engine does. Knows no torch.

Moves are done in the order in which they were decided, all of them before the forward that comes next, and before what
else is done to blocks for it: a block may be read by one move and written by a later one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Route(Enum):
    """From where to where."""

    OUT = "out"  # from the pool to the host's memory
    IN = "in"  # back


@dataclass(frozen=True)
class BlockMove:
    """The contents of block `source` of the one side go to block `target` of the other."""

    route: Route
    source: int
    target: int


class BlockMover(Protocol):
    """What an engine does about them."""

    def carry_out(self, moves: Sequence[BlockMove]) -> None:
        """Has the next forward see them done."""
        ...

    def settle(self) -> None:
        """Returns when all of them are done: from here on other threads may write to blocks that they touched."""
        ...
