"""A TCP proxy before a gateway that loses what passes it on demand: it swallows one direction, then cuts the line."""

import asyncio
import time
from contextlib import asynccontextmanager
from enum import Enum

from kvtransfer.addresses import endpoint


class Direction(Enum):
    FROM_WORKER = "from worker"
    FROM_GATEWAY = "from gateway"


class CutProxy:
    """Forwards connections to `port`. What is swallowed was sent as far as the sender's socket knows."""

    def __init__(self, port: int) -> None:
        self.num_connections = 0
        self.swallowed = bytearray()
        self.endpoint = ""
        self._port = port
        self._swallows: Direction | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task] = set()

    def swallow(self, direction: Direction) -> None:
        self._swallows = direction
        self.swallowed.clear()

    async def cut_behind(self, text: str, seconds: float = 10.0) -> None:
        """Cuts all connections once `text` was swallowed; those that come next are whole again. Waits for the next."""
        await self._until(lambda: text.encode() in self.swallowed, seconds)
        known, self._swallows = self.num_connections, None
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await self._until(lambda: self.num_connections > known, seconds)

    async def _until(self, condition, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the proxy waited in vain"
            await asyncio.sleep(0.005)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back_writer]
        for source, sink, direction in (
            (reader, back_writer, Direction.FROM_WORKER),
            (back_reader, writer, Direction.FROM_GATEWAY),
        ):
            task = asyncio.create_task(self._pump(source, sink, direction))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.num_connections += 1

    async def _pump(self, source, sink, direction: Direction) -> None:
        try:
            while data := await source.read(1 << 16):
                if self._swallows is direction:
                    self.swallowed += data
                else:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def stop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def cut_proxy(port: int):
    proxy = CutProxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.endpoint = endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()
        await server.wait_closed()
