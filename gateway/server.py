"""The HTTP server: uvicorn on h11, with a bound on connections and on every wait for the other side.

Each connection and who has to act:

    open ----> head ----> body ----> answer ----> idle ----> head ...
         client    client      client*    client     client
         head_timeout_s        |          write_timeout_s (it stops reading)
                               * body_timeout_s, in gateway.limits
    idle: keep_alive_s. What is left of a body that has been answered counts as head.

How the server stops, once `should_exit` is set:

    no new connections ----------------> the last word -------------> cut -------------> uvicorn cancels
    running requests may end             what runs still is           whoever has        what no connection
                                         told why it does not         not read it        can end
                     shutdown_timeout_s                 LAST_WORD_S        LAST_WORD_S

h11 on purpose: it cuts a request head at MAX_HEAD_BYTES, where httptools has no limit at all and would be taken by
itself as soon as it is installed.
"""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import ApiError, TooManyConnectionsError, error_body, error_headers
from gateway.limits import HttpSettings

MAX_HEAD_BYTES: Final = 64 << 10
LAST_WORD_S: Final = 0.5
"""What clients get to read why their request ends, when the server stops."""


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, all stated, beside ours."""

    def __init__(self, app: Any, settings: HttpSettings, *, host: str, port: int) -> None:
        self.settings = settings
        super().__init__(
            app,
            host=host,
            port=port,
            loop="asyncio",
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # goes to loop.call_later
            timeout_graceful_shutdown=settings.shutdown_timeout_s + 2 * LAST_WORD_S,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which ends what outlasts the shutdown timeout in order: see the top of this file."""

    def __init__(self, config: ServerConfig, end_requests: Callable[[], object]) -> None:
        super().__init__(config)
        self._timeout_s = config.settings.shutdown_timeout_s
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timers = (
            loop.call_later(self._timeout_s, self._end_requests),
            loop.call_later(self._timeout_s + LAST_WORD_S, self._cut_connections),
        )
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def _cut_connections(self) -> None:
        """A request whose connection is lost ends quietly, where uvicorn's cancel would log a traceback for each."""
        for connection in self.server_state.connections:
            assert isinstance(connection, BoundedProtocol), f"not one of our connections: {connection!r}"
            connection.transport.abort()


def make_server(
    app: Any, settings: HttpSettings, *, host: str, port: int, end_requests: Callable[[], object]
) -> DrainingServer:
    """A server for `await server.serve()`; port 0 takes any free one. Setting its `should_exit` drains and stops it:
    `end_requests` is called once the shutdown timeout is over, and has to fail what the backend still runs."""
    return DrainingServer(ServerConfig(app, settings, host=host, port=port), end_requests)


class BoundedProtocol(H11Protocol):
    """One connection, cut when the client makes us wait too long for a head or for room to write."""

    # h11 looks at the size of a head only while it is incomplete, so it must not get a large one at once.
    SLICE_BYTES = 16 << 10

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.config, ServerConfig), f"made for ServerConfig, not {type(self.config).__name__}"
        self._settings = self.config.settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Any byte that the kernel does not take counts as paused: a client that stops reading is noticed whatever the
        # size of the answer, and no more than one message waits in our memory.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self._settings.max_connections:
            transport.write(_whole_answer(TooManyConnectionsError("this server has as many connections as it takes")))
            transport.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), self.SLICE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + self.SLICE_BYTES])
        self._follow_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_request() or self.conn.trailing_data[0]:  # the next request has begun to come meanwhile
            self._follow_head()

    def send_400_response(self, msg: str) -> None:
        """For what is not HTTP. An answer that is under way already can only be cut."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = ApiError("this is not a valid HTTP request, or its head is too large")
            self.transport.write(_whole_answer(error))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _follow_head(self) -> None:
        """The first byte of a head starts the timer, its last one stops it; those between change nothing."""
        if self._has_request():
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._start_head_timer()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_write_timer(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._settings.write_timeout_s, self._check_writing, num_bytes)

    def _check_writing(self, num_bytes_before: int) -> None:
        """Slow is fine, standing still is not."""
        if self.transport.get_write_buffer_size() < num_bytes_before:
            self._start_write_timer()
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _whole_answer(error: ApiError) -> bytes:
    """An error for a connection that has no request in the eyes of ASGI, and is closed behind it."""
    body = msgspec.json.encode(error_body(error))
    fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    headers = {**fields, **error_headers(error)}
    status_line = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [status_line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body
