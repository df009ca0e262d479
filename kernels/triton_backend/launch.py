"""One kernel call as a value: the backend runs it on a device, `aot` compiles it for one that is not there."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """`kernel` over `grid` with all of its arguments by name, compile-time constants among them."""

    kernel: Any  # a function under @triton.jit
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1  # of the software pipeline that loads ahead of the matrix units

    def run(self) -> None:
        """Queues the kernel on the current stream. An empty grid is nothing to do, and no error."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number` >= 1; Triton's tiles have no other sizes."""
    return 1 << (number - 1).bit_length()
