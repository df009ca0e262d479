"""Host memory between a GPU's pool and the sockets, so that KV moves beside the computation instead of in line with it.

A lane is a second stream of work on the device. Prefill: when a layer of a chunk has been asked of the computation,
that is marked; the lane waits for the mark and gathers into a pinned buffer, and only the sender's thread waits for it:

    computation   | layer 0 | layer 1 | layer 2 | ...
                            ^ mark    ^ mark
    lane                    | gather 0 -> host  | gather 1 -> host | ...

Decode: a frame is copied into a pinned buffer, and from there the lane copies and splices it; a buffer is filled again
only when its last copy is done.

Knows no stream or event of a real device: these are behind `Lane`, so that the order can be tested without one.
"""

import queue
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in a lane's order of work."""

    def synchronize(self) -> None:
        """Returns when everything before it is done."""
        ...


class Lane(Protocol):
    """Work on a device beside the computation, done in the order in which it is asked for. For one thread, except
    `mark`, which is the computation's."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 in host memory that the device copies from and to without stopping anybody."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """What is asked of the device inside is this lane's work."""
        ...

    def mark(self) -> Any:
        """What has been asked of the computation so far."""
        ...

    def follow(self, mark: Any) -> None:
        """What is asked of the lane from here on waits until the computation has come to `mark`."""
        ...

    def record(self) -> Event:
        """What has been asked of the lane so far."""
        ...

    def hold_back(self, event: Any) -> None:
        """What is asked of the computation from here on waits until the lane has come to `event`. Called, like `mark`,
        on the computation's thread."""
        ...


class LentBuffers:
    """Host buffers that go to the sockets. Each comes back when nobody refers to it any more: a socket that sends
    without a copy says in no other way that it is done. Coming back is safe from any thread."""

    def __init__(self, lane: Lane, num_buffers: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(lane.host_buffer(num_bytes))

    @property
    def num_free(self) -> int:
        return self._free.qsize()

    def lend(self, num_bytes: int) -> memoryview:
        """Writable bytes; not from here, and pageable, if all buffers are out. What is out is bounded by the windows
        of the transfers."""
        assert num_bytes <= self._num_bytes, (num_bytes, self._num_bytes)
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            return memoryview(bytearray(num_bytes))
        array = buffer[:num_bytes].numpy()
        weakref.finalize(array, self._free.put, buffer).atexit = False
        return array.data


@dataclass
class _Slot:
    buffer: torch.Tensor
    last_use: Event | None = None


@dataclass
class BufferRing:
    """Host buffers that the lane copies from, used in turn."""

    lane: Lane
    num_buffers: int
    num_bytes: int
    _slots: list[_Slot] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        self._slots = [_Slot(self.lane.host_buffer(self.num_bytes)) for _ in range(self.num_buffers)]

    def fill(self, data: memoryview) -> torch.Tensor:
        """A copy of `data` [len(data)] uint8 for the lane to work on; waits until the buffer's last use is over."""
        slot = self._slots[self._next]
        if slot.last_use is not None:
            slot.last_use.synchronize()
            slot.last_use = None
        view = slot.buffer[: len(data)]
        view.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return view

    def used(self) -> None:
        """All work on what was filled last has been asked of the lane."""
        self._slots[self._next].last_use = self.lane.record()
        self._next = (self._next + 1) % self.num_buffers
