"""The HTTP server: uvicorn on h11, with a bound on connections and on every wait for the other side.

Each connection and who has to act:

    open ----> head ----> body ----> answer ----> idle ----> head ...
         client    client      client*    client     client
         head_timeout_s        |          write_timeout_s (it stops reading)
                               * body_timeout_s, in gateway.limits
    idle: keep_alive_s. What is left of a body that has been answered counts as head.

h11 on purpose: it cuts a request head at MAX_HEAD_BYTES, where httptools has no limit at all and would be taken by
itself as soon as it is installed.
"""

import asyncio
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import RETRY_AFTER_S, TooManyRequestsError, error_body
from gateway.limits import HttpSettings

MAX_HEAD_BYTES: Final = 64 << 10


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
            timeout_graceful_shutdown=settings.shutdown_timeout_s,  # type: ignore[arg-type]  # goes to wait_for
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )


def make_server(app: Any, settings: HttpSettings, *, host: str, port: int) -> uvicorn.Server:
    """A server for `await server.serve()`; port 0 takes any free one. `server.should_exit = True` drains and stops it."""
    return uvicorn.Server(ServerConfig(app, settings, host=host, port=port))


class BoundedProtocol(H11Protocol):
    """One connection, closed when the client makes us wait too long for a head or for room to write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.config, ServerConfig), f"made for ServerConfig, not {type(self.config).__name__}"
        self._settings = self.config.settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            transport.write(_turned_away())
            transport.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_request():
            self._stop_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self._settings.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _follow_head(self) -> None:
        """The first byte of a head starts the timer, its last one stops it; those between change nothing."""
        if self._has_request():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._close_for_head)

    def _close_for_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _turned_away() -> bytes:
    """A complete answer for a connection that is one too many."""
    error = TooManyRequestsError("this server has as many connections as it takes; try again later")
    body = msgspec.json.encode(error_body(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"retry-after: {RETRY_AFTER_S}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
