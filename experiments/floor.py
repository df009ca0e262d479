"""What a step cannot be faster than on this machine: bytes over read bandwidth, operations over the matmul peak.

    decode step   max(weight bytes / bandwidth, linear FLOPs / peak)  +  KV bytes / bandwidth
    prefill       (linear FLOPs + attention FLOPs) / peak

Bandwidth and peak are measured with torch alone, beside the steps they are compared with. The bandwidth is that of
reading as many bytes as the step reads, once a round, between the same neighbours: so the caches hold of the probe's
bytes what they can hold of the step's, and no floor is met or missed for the size of a buffer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.model_config import ModelConfig

_MATMUL_SIZE: Final = 2048
_ITEM_BYTES: Final = 2
"""Of bfloat16."""


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class MachineProbe:
    """Measures read bandwidth over `read_bytes` and bf16 matmul peak again and again."""

    def __init__(self, read_bytes: int) -> None:
        self._buffer = torch.ones(read_bytes // 4)
        self._left = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE).bfloat16()
        self._right = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE).bfloat16()
        self._reads: list[float] = []
        self._products: list[float] = []

    def measure(self) -> None:
        """One more sample of both, with torch's present number of threads. Of two ways to read, the faster counts."""
        buffer = self._buffer
        self._reads.append(min(seconds(buffer.sum), seconds(lambda: torch.dot(buffer, buffer))))
        self._products.append(seconds(lambda: self._left @ self._right.T))

    def result(self, typical: Callable[[Sequence[float]], float]) -> "Machine":
        """The machine's speed; `typical` makes one time of all samples, as it does for the steps."""
        return Machine(self._buffer.nbytes / typical(self._reads), 2 * _MATMUL_SIZE**3 / typical(self._products))


@dataclass(frozen=True)
class Machine:
    """Bytes a second that can be read, floating-point operations a second that bf16 products reach."""

    bandwidth: float
    peak: float


@dataclass(frozen=True)
class ModelCost:
    """Work of a forward of a bf16 model."""

    config: ModelConfig

    @property
    def _layer_weights(self) -> int:
        config = self.config
        attention = config.hidden_size * (config.q_size + 2 * config.kv_size) + config.q_size * config.hidden_size
        return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)

    @property
    def _head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def weight_bytes(self) -> int:
        return (self._layer_weights + self._head_weights) * _ITEM_BYTES

    def kv_bytes(self, batch: int, context: int) -> int:
        """K and V of `batch` rows of `context` tokens."""
        return batch * context * 2 * self.config.num_layers * self.config.kv_size * _ITEM_BYTES

    def decode_floor(self, machine: Machine, batch: int, context: int) -> float:
        """Seconds of a step of `batch` rows of one token, each seeing `context` tokens."""
        flops = 2 * batch * (self._layer_weights + self._head_weights)
        linears = max(self.weight_bytes / machine.bandwidth, flops / machine.peak)
        return linears + self.kv_bytes(batch, context) / machine.bandwidth

    def prefill_floor(self, machine: Machine, tokens: int) -> float:
        """Seconds for one prompt; the output layer runs for its last token only."""
        linear = 2 * (tokens * self._layer_weights + self._head_weights)
        pairs = tokens * (tokens + 1) // 2  # causal: a query sees itself and what is before it
        attention = 4 * pairs * self.config.q_size * self.config.num_layers  # scores and weighted values
        return (linear + attention) / machine.peak
