"""A stream beside the computation's, as `engine.staging.Lane`."""

from contextlib import AbstractContextManager
from typing import Any

import torch


class CudaLane:
    """Work on `device` that the computation's stream does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def active(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def mark(self) -> torch.cuda.Event:
        """Called on the computation's thread: its current stream is the one that is meant."""
        return _recorded(torch.cuda.current_stream(self._device))

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def record(self) -> torch.cuda.Event:
        return _recorded(self._stream)

    def hold_back(self, event: torch.cuda.Event) -> None:
        """Called on the computation's thread, as `mark` is."""
        torch.cuda.current_stream(self._device).wait_event(event)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
