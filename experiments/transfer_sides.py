"""The sides of the transfer benchmark by name: how either process makes its end."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from experiments.bare_ends import Copies, TcpReceivingEnd, TcpSendingEnd, ZmqReceivingEnd, ZmqSendingEnd
from experiments.transfer_ends import KvReceivingEnd, KvSendingEnd, ReceivingEnd, SendingEnd
from experiments.transfer_load import Load, LoadPool
from kvtransfer.frames import FrameOptions

WINDOW_BYTES: Final = 16 << 20
"""The default of --kv-window-mib."""
OURS: Final = "kvsplice"


@dataclass(frozen=True)
class Side:
    """A transport and what it does with the bytes; kvsplice's own always gathers and splices."""

    transport: str  # "kvsplice", "zmq", "ipc" or "tcp"
    copies: Copies
    with_checksum: bool = False  # kvsplice's

    def sending_end(self, load: Load, pool: LoadPool, endpoint: str) -> SendingEnd:
        match self.transport:
            case "kvsplice":
                return KvSendingEnd(load, pool, endpoint, FrameOptions(self.with_checksum))
            case "tcp":
                return TcpSendingEnd(load, pool, self.copies, endpoint)
            case _:
                return ZmqSendingEnd(load, pool, self.copies, endpoint)

    def receiving_end(self, load: Load, pool: LoadPool) -> ReceivingEnd:
        match self.transport:
            case "kvsplice":
                return KvReceivingEnd(load, pool, WINDOW_BYTES)
            case "tcp":
                return TcpReceivingEnd(load, pool, self.copies)
            case _:
                return ZmqReceivingEnd(load, pool, self.copies, ipc=self.transport == "ipc")


SIDES: Final[Mapping[str, Side]] = MappingProxyType(
    {
        OURS: Side("kvsplice", Copies.BOTH),
        "kvsplice, checksum": Side("kvsplice", Copies.BOTH, with_checksum=True),
        "zmq, both copies": Side("zmq", Copies.BOTH),
        "zmq, splice": Side("zmq", Copies.SPLICE),
        "zmq, no copy": Side("zmq", Copies.NONE),
        "ipc, splice": Side("ipc", Copies.SPLICE),
        "tcp, splice": Side("tcp", Copies.SPLICE),
        "tcp, no copy": Side("tcp", Copies.NONE),
    }
)
