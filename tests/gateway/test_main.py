"""The gateway's process: a signal ends it well whenever it comes."""

import asyncio
import signal
import socket

import pytest
import uvicorn

from gateway.__main__ import StopSignals, _listen, _run
from gateway.config import GatewayConfig
from tests.e2e.cluster import free_ports
from tests.gateway.http_world import tokenizer_of_world

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def stop():
    """Catches the signals of the test process while the test runs."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield StopSignals()
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def make_server() -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(app=lambda: None))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_there_is_a_server_stops_it(stop, number):
    server = make_server()
    signal.raise_signal(number)
    assert not server.should_exit
    stop.pass_to(server)
    assert server.should_exit


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_server_has_its_own_handlers_stops_it(stop, number):
    server = make_server()
    stop.pass_to(server)
    assert not server.should_exit
    signal.raise_signal(number)
    assert server.should_exit


def test_a_gateway_that_was_told_to_stop_while_it_started_ends_well(stop):
    config = GatewayConfig(port=0, control_port=free_ports(1)[0])
    signal.raise_signal(signal.SIGTERM)
    running = _run(config, tokenizer_of_world(), _listen("127.0.0.1", 0), stop, keys=None)
    assert asyncio.run(asyncio.wait_for(running, 10.0)) == 0


def test_a_connection_sends_each_token_at_once():
    """asyncio switches Nagle's algorithm off only where a socket says that it is TCP."""
    with _listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.proto == socket.IPPROTO_TCP
