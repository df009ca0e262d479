"""Damages KV frames and swallows some, as bad cables, memory and switches do: any bit that has a checksum may change.

What is not KV goes as it was sent: a word that is damaged beyond being understood costs its link by design.
"""

import random
from collections.abc import Callable

import msgspec

from kvtransfer.codec import encode
from kvtransfer.kv_messages import KvHeader, decode_from_prefill
from tests.simulation.network import Frames

KV_FRAMES = 3  # header, K, V

OTHER_FIELDS: tuple[Callable[[KvHeader], dict[str, int]], ...] = (
    lambda header: {"layer": header.layer + 1},
    lambda header: {"layer": 0},
    lambda header: {"start": header.start + 1, "stop": header.stop + 1},
    lambda header: {"start": max(0, header.start - 1)},
    lambda header: {"sent_bytes": header.sent_bytes + 4096},
    lambda header: {"resend": header.resend + 1},
    lambda header: {"resend": 0},
    lambda header: {"head_stop": header.head_stop + 1},
)


class Noise:
    """`damage`, `loss`: share of the KV frames. `num_damaged` counts what is delivered and is not what was sent,
    `num_lost` what is not delivered."""

    def __init__(self, rng: random.Random, damage: float, loss: float) -> None:
        self.num_damaged = self.num_lost = 0
        self._rng, self._damage, self._loss = rng, damage, loss

    def __call__(self, frames: Frames) -> Frames | None:
        if len(frames) != KV_FRAMES:
            return frames
        if self._rng.random() < self._loss:
            self.num_lost += 1
            return None
        if self._rng.random() >= self._damage:
            return frames
        spoilt = self._spoilt(frames)
        self.num_damaged += spoilt != frames
        return spoilt

    def _spoilt(self, frames: Frames) -> Frames:
        header, k, v = frames
        kind = self._rng.randrange(4)
        if kind == 0:
            return [self._other_header(header), k, v]
        if kind == 1:
            return [header, v, k]
        return [header, self._flip(k), v] if kind == 2 else [header, k, self._flip(v)]

    def _other_header(self, frame: bytes) -> bytes:
        header = decode_from_prefill(frame)
        assert isinstance(header, KvHeader), header
        return encode(msgspec.structs.replace(header, **self._rng.choice(OTHER_FIELDS)(header)))

    def _flip(self, part: bytes) -> bytes:
        at = self._rng.randrange(len(part))
        return part[:at] + bytes([part[at] ^ 1 << self._rng.randrange(8)]) + part[at + 1 :]
