"""Keys, sockets that have some, and a proxy that counts who dials and forgets connections that fall silent."""

import socket as tcp
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from kvtransfer.curve import CurveKeys, write_pair
from kvtransfer.sockets import endpoint_port

NAMES = ("gateway", "prefill", "decode")


def made_keys(folder: Path, *names: str) -> dict[str, CurveKeys]:
    """The keys of processes with these names, all of which know each other."""
    for name in names or NAMES:
        write_pair(folder, name)
    return {name: CurveKeys.load(folder, name) for name in names or NAMES}


def claiming(keys: CurveKeys, server: CurveKeys) -> CurveKeys:
    """`keys` with another idea of which key the gateway and the decode workers have: that of `server`."""
    return CurveKeys(
        keys.name, keys.public_key, keys.secret_key, dict.fromkeys(("gateway", "decode"), server.public_key)
    )


@contextmanager
def raw_dealer(endpoint: str, name: bytes, pair: tuple[bytes, bytes] | None = None, server_key: bytes | None = None):
    """A peer that may call itself whatever it likes, with a key or without."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.LINGER, 0)
    if pair is not None:
        socket.curve_publickey, socket.curve_secretkey = pair
        socket.curve_serverkey = server_key
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


class IdleProxy:
    """Forwards TCP connections to `endpoint`, and drops each that was silent for `idle_s`, as firewalls do: from then
    on it swallows what comes, without a word to either side."""

    def __init__(self, endpoint: str, idle_s: float = 1e9) -> None:
        self.num_connections = self.num_dropped = 0
        self.seen = bytearray()
        self._target = ("127.0.0.1", endpoint_port(endpoint))
        self._idle_s = idle_s
        self._open: list[tcp.socket] = []
        self._listener = tcp.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_connections += 1
                try:
                    far = tcp.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                silence = [time.monotonic()]
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=(source, sink, silence)))
                    self._threads[-1].start()

    def _pump(self, source: tcp.socket, sink: tcp.socket, heard_at: list[float]) -> None:
        is_dropped = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if not is_dropped and time.monotonic() - heard_at[0] > self._idle_s:
                    is_dropped = True
                    self.num_dropped += 1
                if not is_dropped:
                    heard_at[0] = time.monotonic()
                    sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(tcp.SHUT_RDWR)

    def stop(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(tcp.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(tcp.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for connection in self._open:
            connection.close()


@contextmanager
def idle_proxy(endpoint: str, idle_s: float = 1e9):
    proxy = IdleProxy(endpoint, idle_s)
    try:
        yield proxy
    finally:
        proxy.stop()
