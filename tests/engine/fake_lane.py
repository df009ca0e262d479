"""A lane without a device: work is done when it is asked for, and who waited for what is written down."""

from contextlib import contextmanager

import torch


class FakeEvent:
    def __init__(self, lane, number) -> None:
        self._lane, self.number = lane, number

    def synchronize(self) -> None:
        self._lane.log.append(("waited for", self.number))


class FakeLane:
    """`engine.staging.Lane`."""

    def __init__(self) -> None:
        self.log: list = []
        self.buffers: list[torch.Tensor] = []
        self.is_active = False
        self._num_events = self._num_marks = 0

    def host_buffer(self, num_bytes):
        self.buffers.append(torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    @contextmanager
    def active(self):
        assert not self.is_active
        self.is_active = True
        yield
        self.is_active = False

    def mark(self):
        assert not self.is_active, "marks are the computation's"
        self._num_marks += 1
        return f"mark {self._num_marks}"

    def follow(self, mark) -> None:
        assert self.is_active
        self.log.append(("follows", mark))

    def record(self):
        self._num_events += 1
        self.log.append(("recorded", self._num_events))
        return FakeEvent(self, self._num_events)

    def hold_back(self, event) -> None:
        assert not self.is_active, "it is the computation that waits"
        self.log.append(("held back until", event.number))
