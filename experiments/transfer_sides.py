"""The sides of the transfer benchmark by name: how either process makes its end."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from experiments.bare_ends import (
    Copies,
    TcpReceivingEnd,
    TcpSendingEnd,
    ZmqReceivingEnd,
    ZmqSendingEnd,
    keys_that_are_no_secret,
)
from experiments.transfer_ends import DECODE, PREFILL, KvReceivingEnd, KvSendingEnd, ReceivingEnd, SendingEnd
from experiments.transfer_load import Load, LoadPool
from kvtransfer.curve import CurveKeys
from kvtransfer.frames import TOGETHER_BYTES, FrameOptions

WINDOW_BYTES: Final = 16 << 20
"""The default of --kv-window-mib."""
OURS: Final = "kvsplice"


@dataclass(frozen=True)
class Side:
    """A transport and what it does with the bytes; kvsplice's own always gathers and splices."""

    transport: str  # "kvsplice", "zmq", "ipc" or "tcp"
    copies: Copies
    with_checksum: bool = False  # kvsplice's
    with_curve: bool = False  # encrypted: kvsplice's and zmq's

    def sending_end(self, load: Load, pool: LoadPool, endpoint: str) -> SendingEnd:
        match self.transport:
            case "kvsplice":
                options = FrameOptions(self.with_checksum, together_bytes=TOGETHER_BYTES)
                return KvSendingEnd(load, pool, endpoint, options, self._keys(PREFILL[0]))
            case "tcp":
                return TcpSendingEnd(load, pool, self.copies, endpoint)
            case _:
                return ZmqSendingEnd(load, pool, self.copies, endpoint, with_curve=self.with_curve)

    def receiving_end(self, load: Load, pool: LoadPool) -> ReceivingEnd:
        match self.transport:
            case "kvsplice":
                return KvReceivingEnd(load, pool, WINDOW_BYTES, self._keys(DECODE[0]))
            case "tcp":
                return TcpReceivingEnd(load, pool, self.copies)
            case _:
                is_ipc = self.transport == "ipc"
                return ZmqReceivingEnd(load, pool, self.copies, ipc=is_ipc, with_curve=self.with_curve)

    def _keys(self, name: str) -> CurveKeys | None:
        return keys_that_are_no_secret(name) if self.with_curve else None


SIDES: Final[Mapping[str, Side]] = MappingProxyType(
    {
        OURS: Side("kvsplice", Copies.BOTH),
        "kvsplice, checksum": Side("kvsplice", Copies.BOTH, with_checksum=True),
        "kvsplice, CURVE": Side("kvsplice", Copies.BOTH, with_curve=True),
        "zmq, both copies": Side("zmq", Copies.BOTH),
        "zmq, both copies, CURVE": Side("zmq", Copies.BOTH, with_curve=True),
        "zmq, splice": Side("zmq", Copies.SPLICE),
        "zmq, no copy": Side("zmq", Copies.NONE),
        "ipc, splice": Side("ipc", Copies.SPLICE),
        "tcp, splice": Side("tcp", Copies.SPLICE),
        "tcp, no copy": Side("tcp", Copies.NONE),
    }
)
