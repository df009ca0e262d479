"""How fast a device is and how long a call on it takes: CPU and CUDA alike, measured with torch alone.

Every call is timed by itself after the caches have been filled with something else: a kernel of a real step finds the K
and V of its layer in memory, not in a cache.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

import torch

from experiments.floor import seconds
from experiments.kernel_work import Speeds

Call = Callable[[], object]

_CUDA_EVICT_BYTES: Final = 512 << 20
_CPU_EVICT_BYTES: Final = 128 << 20
"""More than the last cache of any chip here holds."""
_CUDA_MATMUL: Final = 8192
_CPU_MATMUL: Final = 1536


class BenchDevice:
    """One device under test. `typical` makes one time of those of all rounds."""

    def __init__(self, device: torch.device, rounds: int, typical: Callable[[Sequence[float]], float] = median) -> None:
        self.device = device
        self._rounds = rounds
        self._typical = typical
        self._on_gpu = device.type == "cuda"
        size = _CUDA_EVICT_BYTES if self._on_gpu else _CPU_EVICT_BYTES
        self._evict_from = torch.ones(size, dtype=torch.uint8, device=device)
        self._evict_to = torch.empty_like(self._evict_from)
        self._matmul_size = _CUDA_MATMUL if self._on_gpu else _CPU_MATMUL
        shape = (self._matmul_size, self._matmul_size)
        self._left, self._right = (torch.randn(shape, device=device).bfloat16() for _ in range(2))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self._on_gpu else f"cpu, threads: {torch.get_num_threads()}"

    def take_turns(self, calls: Mapping[str, Call]) -> tuple[dict[str, float], Speeds]:
        """Typical seconds of each call, and how fast the device was meanwhile: what disturbs one disturbs all. The
        first round is not counted, since it may compile or allocate."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        copies: list[float] = []
        products: list[float] = []
        for number in range(self._rounds + 1):
            turn = {name: self._seconds_after_eviction(call) for name, call in calls.items()}
            copied, multiplied = self._seconds(self._evict), self._seconds_after_eviction(self._multiply)
            if number > 0:
                copies.append(copied)
                products.append(multiplied)
                for name, taken in turn.items():
                    times[name].append(taken)
        speeds = Speeds(2 * self._evict_from.numel() / self._typical(copies), self._flops / self._typical(products))
        return {name: self._typical(taken) for name, taken in times.items()}, speeds

    @property
    def _flops(self) -> int:
        return int(2 * self._matmul_size**3)

    def _evict(self) -> None:
        self._evict_to.copy_(self._evict_from)

    def _multiply(self) -> torch.Tensor:
        return self._left @ self._right

    def _seconds_after_eviction(self, call: Call) -> float:
        self._evict()
        return self._seconds(call)

    def _seconds(self, call: Call) -> float:
        return self._gpu_seconds(call) if self._on_gpu else seconds(call)

    def _gpu_seconds(self, call: Call) -> float:
        """Between two events on the stream. The eviction in front of the first one keeps the device busy until the host
        has queued the rest, so that launching is no part of the time."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) / 1e3
