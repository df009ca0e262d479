"""What the hand-over is measured against: loops over bare sockets that move frames of the same sizes and do no more.

`copies` says what they do with the bytes: nothing (the sender ships its pool as it lies, the receiver drops what it
got), "splice" (the receiver copies each message into its paged pool), or "both" (the sender gathers each message from
its paged pool as well): then they touch the same memory as the hand-over does.
"""

import hashlib
import socket
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from engine.buffers import as_bytes, from_bytes
from engine.kv_cache import dtype_named
from experiments.transfer_ends import DECODE, PREFILL, ROUND_SECONDS, BenchError
from experiments.transfer_load import HEADER_BYTES, Load, LoadPool
from kvtransfer.curve import CurveKeys, be_client
from kvtransfer.kv_channel import KV_HWM
from kvtransfer.outgoing import Piece

_HEADER: Final = bytes(HEADER_BYTES)
_DONE: Final = b"done"

Frames = tuple[memoryview, memoryview]
"""K and V of one message."""


class Copies(Enum):
    """What a bare loop does beside moving frames."""

    NONE = "none"
    SPLICE = "splice"
    BOTH = "both"


def keys_that_are_no_secret(name: str) -> CurveKeys:
    """The same in both processes: what encryption costs does not depend on who knows the keys."""
    secret = {end: z85.encode(hashlib.sha256(end.encode()).digest()) for end in (PREFILL[0], DECODE[0])}
    public = {end: zmq.curve_public(key) for end, key in secret.items()}
    return CurveKeys(name, public[name], secret[name], public)


class _Frames:
    """K and V of every message of a round, on the sender's side."""

    def __init__(self, load: Load, pool: LoadPool, copies: Copies) -> None:
        self._load, self._pool = load, pool
        self._lying = None if copies is Copies.BOTH else [*self._as_they_lie()]

    def __iter__(self) -> Iterator[Frames]:
        return iter(self._lying) if self._lying is not None else self._gathered()

    def _gathered(self) -> Iterator[Frames]:
        for request, piece in self._load.pieces():
            yield self._pool.gather(request, piece)

    def _as_they_lie(self) -> Iterator[Frames]:
        """As many bytes of the same layer: other tokens than the request's, but no copy."""
        for request, piece in self._load.pieces():
            k, v = (as_bytes(part) for part in self._pool.kv_cache.layer(piece.layer))
            size = self._load.bytes_of(piece)
            start = request * size % (len(k) - size + 1)
            yield k[start : start + size], v[start : start + size]


class _Splicer:
    """What becomes of a message on the receiver's side."""

    def __init__(self, load: Load, pool: LoadPool, copies: Copies) -> None:
        self._pool, self._splices = pool, copies is not Copies.NONE
        self._dtype = dtype_named(load.layout.dtype)
        self._token_shape = (load.layout.num_kv_heads, load.layout.head_dim)

    def take(self, request: int, piece: Piece, k: memoryview, v: memoryview) -> None:
        if self._splices:
            shape = (piece.num_layers * (piece.stop - piece.start), *self._token_shape)
            key, value = (from_bytes(part, self._dtype, shape) for part in (k, v))
            where = piece.layer, self._pool.block_ids[request], piece.start, piece.stop
            self._pool.kv_cache.splice(*where, key, value, num_layers=piece.num_layers)


def _patience(zmq_socket: "zmq.Socket[bytes]") -> None:
    milliseconds = int(ROUND_SECONDS * 1000)
    zmq_socket.setsockopt(zmq.RCVTIMEO, milliseconds)
    zmq_socket.setsockopt(zmq.SNDTIMEO, milliseconds)
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.SNDHWM, KV_HWM)
    zmq_socket.setsockopt(zmq.RCVHWM, KV_HWM)


class ZmqSendingEnd:
    """A DEALER: header, K, V, without a copy, as fast as the socket takes them."""

    def __init__(self, load: Load, pool: LoadPool, copies: Copies, endpoint: str, *, with_curve: bool) -> None:
        self._frames = _Frames(load, pool, copies)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _patience(self._socket)
        if with_curve:
            keys = keys_that_are_no_secret(PREFILL[0])
            be_client(self._socket, keys, keys.public_key_of(DECODE[0]))
        self._socket.connect(endpoint)

    def send_round(self, number: int) -> None:
        for k, v in self._frames:
            self._socket.send_multipart([_HEADER, k, v], copy=False)
        if self._socket.recv() != _DONE:
            raise BenchError("the other side said something else than that it is done")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ZmqReceivingEnd:
    """A ROUTER on loopback TCP or, with `ipc`, on a socket in the file system."""

    def __init__(self, load: Load, pool: LoadPool, copies: Copies, *, ipc: bool, with_curve: bool) -> None:
        self._load = load
        self._splicer = _Splicer(load, pool, copies)
        self._folder = tempfile.TemporaryDirectory(prefix="kvsplice-bench-")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _patience(self._socket)
        if with_curve:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)  # and nobody asks whose key it is
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys_that_are_no_secret(DECODE[0]).secret_key)
        self._socket.bind(f"ipc://{Path(self._folder.name) / 'kv'}" if ipc else "tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def prepare(self, number: int) -> None:
        """The socket listens all the time."""

    def receive_round(self, number: int) -> None:
        link = b""
        for request, piece in self._load.pieces():
            frames = self._socket.recv_multipart(copy=False)
            self._splicer.take(request, piece, frames[2].buffer, frames[3].buffer)
            link = frames[0].bytes
        self._socket.send_multipart([link, _DONE])

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._folder.cleanup()


class TcpSendingEnd:
    """A plain socket: the kernel's own speed."""

    def __init__(self, load: Load, pool: LoadPool, copies: Copies, endpoint: str) -> None:
        self._frames = _Frames(load, pool, copies)
        host, port = endpoint.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=ROUND_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_round(self, number: int) -> None:
        for k, v in self._frames:
            for part in (_HEADER, k, v):
                self._socket.sendall(part)
        if self._socket.recv(len(_DONE), socket.MSG_WAITALL) != _DONE:
            raise BenchError("the other side hung up")

    def close(self) -> None:
        self._socket.close()


class TcpReceivingEnd:
    """Reads each message into the same two buffers."""

    def __init__(self, load: Load, pool: LoadPool, copies: Copies) -> None:
        self._load = load
        self._splicer = _Splicer(load, pool, copies)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self._header, self._k, self._v = (
            memoryview(bytearray(size)) for size in (HEADER_BYTES, load.frame_bytes, load.frame_bytes)
        )
        host, port = self._listener.getsockname()
        self.endpoint = f"{host}:{port}"

    def prepare(self, number: int) -> None:
        """Whoever has connected waits in the kernel until it is taken."""

    def receive_round(self, number: int) -> None:
        connection = self._accepted()
        for request, piece in self._load.pieces():
            size = self._load.bytes_of(piece)
            k, v = self._k[:size], self._v[:size]
            for part in (self._header, k, v):
                _read(connection, part)
            self._splicer.take(request, piece, k, v)
        connection.sendall(_DONE)

    def _accepted(self) -> socket.socket:
        if self._connection is None:
            self._listener.settimeout(ROUND_SECONDS)
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(ROUND_SECONDS)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


def _read(connection: socket.socket, into: memoryview) -> None:
    """Fills `into`. Raises BenchError if the other side has hung up."""
    while into:
        taken = connection.recv_into(into)
        if taken == 0:
            raise BenchError("the other side hung up")
        into = into[taken:]
