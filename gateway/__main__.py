"""`python -m gateway` and `kvsplice gateway`: the HTTP face and the control plane behind it."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import version

import uvicorn

from gateway.app import create_app
from gateway.cluster import Cluster, ClusterSettings
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher, DispatchSettings
from gateway.failover import FailoverSettings
from gateway.limits import HttpSettings
from gateway.metrics import Metrics
from gateway.modes import Mode, ModeRules
from gateway.server import make_server
from gateway.tokenizer import Tokenizer
from kvtransfer.channel import ControlServer
from kvtransfer.command_line import one_line_errors, parse
from kvtransfer.curve import GATEWAY_KEY, CurveKeys, load_keys
from kvtransfer.errors import SettingsError
from kvtransfer.logs import configure_logging
from kvtransfer.signals import STOP_SIGNALS, exit_on_signals, run_and_leave
from launcher.default_model import resolve_model

logger = logging.getLogger(__name__)

PROG = "kvsplice gateway"
DESCRIPTION = "Takes OpenAI-style HTTP calls and runs each on a prefill and a decode worker, or on decode alone."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a gateway until it is told to stop; returns the exit code."""
    config = parse(GatewayConfig, sys.argv[1:] if argv is None else argv, os.environ, PROG, DESCRIPTION)
    configure_logging(config.log_level)
    exit_on_signals()
    with one_line_errors(PROG):
        keys = load_keys(config.curve_dir, GATEWAY_KEY)
        listener = _listen(config.host, config.port)
        tokenizer = Tokenizer.load(str(resolve_model(config.model, weights=False)))
        stop = StopSignals()
        return asyncio.run(_run(config, tokenizer, listener, stop, keys))


class StopSignals:
    """Takes SIGINT and SIGTERM from its making on, and stops the server with the first, as soon as there is one.

    uvicorn has handlers of its own while it serves, and raises what it caught anew behind its clean end.
    """

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._is_caught = False
        for signum in STOP_SIGNALS:
            signal.signal(signum, lambda *_: self._catch())

    def pass_to(self, server: uvicorn.Server) -> None:
        """From now on a signal, also one that came before, makes this server drain and stop."""
        self._server = server
        if self._is_caught:
            server.should_exit = True

    def _catch(self) -> None:
        self._is_caught = True
        if self._server is not None:
            self._server.should_exit = True


async def _run(
    config: GatewayConfig, tokenizer: Tokenizer, listener: socket.socket, stop: StopSignals, keys: CurveKeys | None
) -> int:
    """Serves HTTP and workers until the server is told to stop (0) or the control plane dies (1)."""
    control = ControlServer(config.control_host, config.control_port, keys)
    metrics = Metrics()
    cluster = Cluster(secrets.token_hex(8), _cluster_settings(config, tokenizer))
    dispatcher = Dispatcher(cluster, _dispatch_settings(config), observer=metrics)
    _watch(dispatcher, metrics)
    settings = _http_settings(config)
    admin = dispatcher.administrator if config.takes_admin_calls else None
    app = create_app(dispatcher, tokenizer, settings, metrics, admin)
    dispatching = asyncio.create_task(dispatcher.run(control), name="dispatcher")
    # A dispatcher that is cancelled fails its requests.
    server = make_server(app, settings, host=config.host, port=config.port, end_requests=dispatching.cancel)
    stop.pass_to(server)
    logger.info("HTTP on %s:%d, workers dial %s", *listener.getsockname()[:2], control.endpoint)
    try:
        return await _serve_both(server, listener, dispatching)
    finally:
        control.close()


def _watch(dispatcher: Dispatcher, metrics: Metrics) -> None:
    metrics.watch_workers(lambda: dispatcher.workers, lambda: dispatcher.capable_ids)
    metrics.watch_count(
        "malformed_messages", "Control messages that could not be read.", lambda: dispatcher.num_malformed
    )
    metrics.watch_count(
        "late_outputs",
        "Outputs of workers for requests, or attempts, that were over.",
        lambda: dispatcher.num_late_outputs,
    )


async def _serve_both(server: uvicorn.Server, listener: socket.socket, dispatching: asyncio.Task[None]) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    await asyncio.wait({dispatching, serving}, return_when=asyncio.FIRST_COMPLETED)
    control_died = dispatching.done() and not dispatching.cancelled()
    if control_died:
        logger.critical("the control plane has died; giving up", exc_info=dispatching.exception())
        server.should_exit = True
    await serving
    dispatching.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await dispatching
    return 1 if control_died else 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound before anything slow happens, so that a port in use is said at once. Raises SettingsError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, or asyncio leaves TCP_NODELAY off: then a token waits 40 ms for the client's kernel
        # to acknowledge the one before it.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _cluster_settings(config: GatewayConfig, tokenizer: Tokenizer) -> ClusterSettings:
    return ClusterSettings(
        dead_after_s=config.dead_after_s,
        stalled_after_s=config.stalled_after_s,
        tokenizer_vocab_size=tokenizer.num_ids,
    )


def _dispatch_settings(config: GatewayConfig) -> DispatchSettings:
    return DispatchSettings(
        max_in_flight=config.max_concurrent_requests,
        stream_buffer_tokens=config.stream_buffer_tokens,
        request_timeout_s=config.request_timeout_s,
        first_token_timeout_s=config.first_token_timeout_s,
        failover=FailoverSettings(config.max_retries, config.failover_timeout_s),
        modes=ModeRules(Mode(config.default_mode), config.local_prefill_threshold),
    )


def _http_settings(config: GatewayConfig) -> HttpSettings:
    return HttpSettings(
        served_model_names=config.served_names,
        version=version("kvsplice"),
        api_key=config.api_key,
        admin_key=config.admin_key,
        default_seed=config.default_seed,
        max_body_bytes=config.max_body_bytes,
        max_connections=config.max_connections,
        max_concurrent_requests=config.max_concurrent_requests,
        stream_buffer_tokens=config.stream_buffer_tokens,
        head_timeout_s=config.head_timeout_s,
        shutdown_timeout_s=config.shutdown_timeout_s,
        request_timeout_s=config.request_timeout_s,
        failover_timeout_s=config.failover_timeout_s,
    )


if __name__ == "__main__":
    run_and_leave(main)
