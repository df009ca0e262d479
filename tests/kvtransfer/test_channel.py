"""The sockets: each option by its effect where that is cheap, else by its value; garbage stays an error value."""

import asyncio
import socket as tcp
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import zmq

from kvtransfer import addresses
from kvtransfer.channel import CONTROL_HWM, ControlClient, ControlServer
from kvtransfer.codec import MAX_CONTROL_BYTES, encode
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.kv_channel import KV_HWM, KV_RECEIVE_HWM, KvDialer, KvListener
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvDone, KvHeader, KvOffer
from kvtransfer.layout import KvBody
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import GatewayBeat, Heartbeat
from kvtransfer.sockets import bind, endpoint_port
from kvtransfer.worker_facts import Load

BEAT = Heartbeat("g1", 0, 1, Load(0, 0, 0.0))
OFFER = KvOffer("r", 0, 4)
HEADER = KvHeader("r", 0, 0, 0, 4, 0, 2, "float32")
PATIENCE_S = 10.0


@pytest.fixture
def dialer():
    made = KvDialer("prefill-0/g1")
    yield made
    made.close()


@contextmanager
def raw_dealer(endpoint: str, name: bytes = b"raw"):
    """A peer that may send anything."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def free_endpoint() -> str:
    """Where nobody listens."""
    with tcp.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return addresses.endpoint("127.0.0.1", probe.getsockname()[1])


def receive(polled, seconds: float = PATIENCE_S):
    """What `polled` receives first, or None; of a listener, its only word."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        polled.poll(0.05)
        if got := polled.receive():
            if not isinstance(polled, KvListener):
                return got
            [word] = got
            return word
    return None


def say(end, peer, *message):
    """Lets an end of a KV link say a message by itself; True if it was taken."""
    taken = end.send(peer, *message)
    end.poll(0)
    return taken is not False


def until(condition, seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def in_loop(scenario):
    """Runs `scenario(server)` in an event loop around a ControlServer."""

    async def run() -> None:
        server = ControlServer("127.0.0.1", 0)
        try:
            await asyncio.wait_for(scenario(server), 30)
        finally:
            server.close()

    asyncio.run(run())


# --- options


OPTIONS = {
    zmq.LINGER: 200,
    zmq.HANDSHAKE_IVL: 5_000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1_000,
    zmq.TCP_KEEPALIVE: 1,
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_socket_has_the_option(option, listener, dialer):
    dialer.dial("decode-0", listener.endpoint)
    client = ControlClient("w", [listener.endpoint])
    try:
        for socket in (listener._socket, dialer._lines["decode-0"].socket, client._lines[listener.endpoint].socket):
            assert socket.getsockopt(option) == OPTIONS[option]
        assert client._lines[listener.endpoint].socket.getsockopt(zmq.MAXMSGSIZE) == MAX_CONTROL_BYTES
        assert dialer._lines["decode-0"].socket.getsockopt(zmq.MAXMSGSIZE) == MAX_BODY_BYTES
    finally:
        client.close()

    async def scenario(server) -> None:
        assert server._socket.getsockopt(option) == OPTIONS[option]

    in_loop(scenario)


BEATS = {zmq.HEARTBEAT_IVL: 500, zmq.HEARTBEAT_TIMEOUT: 2_000, zmq.HEARTBEAT_TTL: 2_000}


@pytest.mark.parametrize("option", BEATS, ids=lambda option: option.name)
def test_whoever_dials_beats_for_both_sides(option, listener, dialer):
    dialer.dial("decode-0", listener.endpoint)
    client = ControlClient("w", [listener.endpoint])
    try:
        for socket in (dialer._lines["decode-0"].socket, client._lines[listener.endpoint].socket):
            assert socket.getsockopt(option) == BEATS[option]
        assert listener._socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
    finally:
        client.close()

    async def scenario(server) -> None:
        assert server._socket.getsockopt(zmq.HEARTBEAT_IVL) == 0

    in_loop(scenario)


FULL_QUEUE = """
import time, zmq
from kvtransfer.kv_channel import KV_RECEIVE_HWM, KvListener

listener, context = KvListener("127.0.0.1", 0), zmq.Context()
dealers = [context.socket(zmq.DEALER) for _ in range(3)]
for dealer in dealers:
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(listener.endpoint)
    for _ in range(2 * KV_RECEIVE_HWM):
        dealer.send(bytes(200))
time.sleep(1.0)
for dealer in dealers:
    dealer.close(linger=0)
time.sleep(1.5)  # as a process does that is stopped, or busy: whatever falls due meanwhile falls due with queues full
while listener.receive():
    pass
context.term()
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.connect(listener.endpoint)
    dealer.send(b"another")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not listener.receive():
        listener.poll(0.1)
    assert time.monotonic() < deadline
listener.close()
"""


def test_peers_that_hang_up_behind_full_queues_do_not_end_the_process():
    """libzmq would, on a socket that listens and beats: "Assertion failed: !_io_error"."""
    done = subprocess.run([sys.executable, "-c", FULL_QUEUE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_queues_are_bounded_on_both_sides(listener, dialer):
    dialer.dial("decode-0", listener.endpoint)
    for socket in (listener._socket, dialer._lines["decode-0"].socket):
        assert (socket.getsockopt(zmq.SNDHWM), socket.getsockopt(zmq.RCVHWM)) == (KV_HWM, KV_RECEIVE_HWM)

    async def scenario(server) -> None:
        assert server._socket.getsockopt(zmq.SNDHWM) == server._socket.getsockopt(zmq.RCVHWM) == CONTROL_HWM

    in_loop(scenario)


def test_a_full_queue_fails_the_send_and_kv_may_be_queued_for_a_peer_that_is_not_up_yet(dialer):
    dialer.dial("decode-0", free_endpoint())
    taken = [say(dialer, "decode-0", OFFER) for _ in range(KV_HWM + 1)]
    assert taken == [True] * KV_HWM + [False]
    assert not dialer.has_room("decode-0")


def test_poll_returns_when_a_full_queue_has_room_again(dialer):
    endpoint = free_endpoint()
    dialer.dial("decode-0", endpoint)
    while say(dialer, "decode-0", OFFER):
        pass
    listener = KvListener("127.0.0.1", endpoint_port(endpoint))
    try:
        before = time.monotonic()
        while not dialer.has_room("decode-0"):
            dialer.poll(PATIENCE_S)
            dialer.receive()
        assert time.monotonic() - before < PATIENCE_S / 2
        dialer.receive()
        dialer.poll(0)
        before = time.monotonic()
        dialer.poll(0.1)
        assert time.monotonic() - before > 0.05, "room is waited for only after a full queue"
    finally:
        listener.close()


def test_control_messages_are_not_queued_for_a_gateway_that_is_not_up(listener):
    client = ControlClient("w", [free_endpoint(), listener.endpoint])
    try:
        down, up = client._lines
        assert until(lambda: client.send(up, BEAT))
        assert not client.send(down, BEAT)
    finally:
        client.close()


def test_a_frame_above_the_bound_costs_its_sender_the_link_and_nobody_else_anything(listener, dialer):
    dialer.dial("decode-0", listener.endpoint)
    with raw_dealer(listener.endpoint) as raw:
        raw.send_multipart([encode(HEADER), bytes(MAX_BODY_BYTES + 1), b""])
        assert receive(listener, 0.3) is None
        body = bytes(range(256)) * (MAX_BODY_BYTES // 256)
        say(dialer, "decode-0", HEADER, KvBody(memoryview(body), memoryview(body)))
        link, message, received = receive(listener)
        assert (link, message) == (b"prefill-0/g1", HEADER)
        assert bytes(received.k) == bytes(received.v) == body


def test_a_control_frame_above_the_bound_is_refused_by_libzmq():
    async def scenario(server) -> None:
        assert server._socket.getsockopt(zmq.MAXMSGSIZE) == MAX_CONTROL_BYTES

    in_loop(scenario)


def test_a_message_for_an_unknown_peer_is_not_sent(listener):
    listener.send(b"nobody", KvDone("r", 0))
    listener.poll(0)
    assert not listener._unsaid, "it would wait for ever"

    async def scenario(server) -> None:
        assert not server.send("nobody", GatewayBeat("e", 0))
        assert not server.send("\N{REPLACEMENT CHARACTER}", GatewayBeat("e", 0))

    in_loop(scenario)


def test_a_restarted_peer_takes_over_its_name(listener):
    with raw_dealer(listener.endpoint, b"same") as old:
        old.send(encode(OFFER))
        assert receive(listener)[0] == b"same"
        with raw_dealer(listener.endpoint, b"same") as new:
            new.send(encode(OFFER))
            assert receive(listener)[0] == b"same"
            say(listener, b"same", KvDone("r", 0))
            assert new.poll(PATIENCE_S * 1000)
            assert not old.poll(0)


def test_a_link_that_is_cut_comes_back_by_itself(dialer):
    endpoint = free_endpoint()
    dialer.dial("decode-0", endpoint)
    for _ in range(2):
        listener = KvListener("127.0.0.1", endpoint_port(endpoint))
        try:
            say(dialer, "decode-0", OFFER)
            assert receive(listener)[1] == OFFER
        finally:
            listener.close()


def test_closing_does_not_wait_for_peers_that_never_come():
    dialer, client = KvDialer("p/g"), ControlClient("w", [free_endpoint()])
    dialer.dial("decode-0", free_endpoint())
    dialer.dial("decode-1", free_endpoint())
    for _ in range(10):
        say(dialer, "decode-0", OFFER)
        say(dialer, "decode-1", OFFER)
    before = time.monotonic()
    dialer.hang_up("decode-1")
    dialer.close()
    client.close()
    assert time.monotonic() - before < 2.0


def test_what_was_sent_last_arrives_although_the_client_closes_at_once():
    async def scenario(server) -> None:
        client = ControlClient("w", [server.endpoint])
        assert until(lambda: client.send(server.endpoint, BEAT))
        for progress in range(2, 50):
            client.send(server.endpoint, Heartbeat("g1", 0, progress, Load(0, 0, 0.0)))
        client.close()
        received = [(await server.receive())[1].progress for _ in range(49)]
        assert received == list(range(1, 50))

    in_loop(scenario)


# --- addresses


def test_a_taken_port_is_a_settings_error(listener):
    with pytest.raises(SettingsError, match=r"cannot listen on 127\.0\.0\.1"):
        KvListener("127.0.0.1", endpoint_port(listener.endpoint))


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "ipc:///tmp/x", "tcp://a:b", "tcp://a:70000"]
)
def test_an_endpoint_that_cannot_be_dialled_is_a_settings_error_and_leaves_nothing_open(endpoint):
    dialer = KvDialer("p/g")
    with pytest.raises(SettingsError, match="tcp://HOST:PORT"):
        dialer.dial("decode-0", endpoint)
    before = time.monotonic()
    dialer.close()
    assert time.monotonic() - before < 2.0


def test_ipv6_works_where_there_is_any():
    try:
        with tcp.socket(tcp.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    listener, dialer = KvListener("::1", 0), KvDialer("p/g")
    try:
        dialer.dial("decode-0", listener.endpoint)
        say(dialer, "decode-0", OFFER)
        assert receive(listener)[1] == OFFER
    finally:
        dialer.close()
        listener.close()


# --- messages


def test_kv_messages_arrive_with_and_without_bodies(listener, dialer):
    dialer.dial("decode-0", listener.endpoint)
    say(dialer, "decode-0", OFFER)
    say(dialer, "decode-0", HEADER, KvBody(memoryview(b"kkkk"), memoryview(b"vvvv")))
    assert receive(listener) == (b"prefill-0/g1", OFFER, None)
    link, message, body = receive(listener)
    assert (link, message, bytes(body.k), bytes(body.v)) == (b"prefill-0/g1", HEADER, b"kkkk", b"vvvv")
    say(listener, link, KvDone("r", 0))
    assert receive(dialer) == [("decode-0", KvDone("r", 0))]


GARBAGE = [[b""], [b"\xc1"], [b"", b""], [encode(OFFER), b"k"], [encode(OFFER)] * 5, [b"x"] * 200]


@pytest.mark.parametrize("frames", GARBAGE, ids=len)
@pytest.mark.parametrize("name", [b"raw", b"\xff\xfe\x80"], ids=["text", "not-utf-8"])
def test_garbage_at_the_kv_listener_is_an_error_value(frames, name, listener):
    with raw_dealer(listener.endpoint, name) as raw:
        raw.send_multipart(frames)
        link, message, _ = receive(listener)
        assert link == name
        assert isinstance(message, MessageError)
        raw.send(encode(OFFER))
        assert receive(listener)[1] == OFFER


@pytest.mark.parametrize("frames", GARBAGE, ids=len)
@pytest.mark.parametrize(("name", "shown"), [(b"raw", "raw"), (b"\xff\x80", "\N{REPLACEMENT CHARACTER}" * 2)])
def test_garbage_at_the_control_server_is_an_error_value(frames, name, shown):
    async def scenario(server) -> None:
        with raw_dealer(server.endpoint, name) as raw:
            raw.send_multipart(frames)
            sender, message = await server.receive()
            assert sender == shown
            assert isinstance(message, MessageError)
            raw.send(encode(BEAT))
            assert await server.receive() == (shown, BEAT)

    in_loop(scenario)


def test_garbage_from_the_other_side_is_an_error_value(dialer):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    endpoint = bind(router, "127.0.0.1", 0)
    client = ControlClient("w", [endpoint])
    try:
        dialer.dial("decode-0", endpoint)
        say(dialer, "decode-0", OFFER)
        assert until(lambda: client.send(endpoint, BEAT))
        names = {router.recv_multipart()[0] for _ in range(2)}
        assert names == {b"prefill-0/g1", b"w"}
        for name in names:
            router.send_multipart([name, b"\xc1", b"more"])
        [(peer, kv_error)] = receive(dialer)
        [(gateway, control_error)] = receive(client)
        assert (peer, gateway) == ("decode-0", endpoint)
        assert isinstance(kv_error, MessageError)
        assert isinstance(control_error, MessageError)
    finally:
        client.close()
        router.close()
        context.term()


def test_sending_never_swallows_the_wake_up_of_a_waiting_receive():
    """ZeroMQ's file descriptor is edge-triggered: a send takes in what has arrived, and then nobody is woken."""

    async def scenario(server) -> None:
        client = ControlClient("w", [server.endpoint])
        assert until(lambda: client.send(server.endpoint, BEAT))
        await server.receive()
        for _ in range(3):
            waiting = asyncio.ensure_future(server.receive())
            await asyncio.sleep(0.01)
            client.send(server.endpoint, BEAT)
            client.poll(0.03)  # the message arrives while the loop is busy, and then the loop sends
            assert server.send("w", GatewayBeat("e", 0))
            assert await asyncio.wait_for(waiting, 5) == ("w", BEAT)
        client.close()

    in_loop(scenario)


def test_a_mailbox_ends_the_wait_for_sockets(listener):
    mailbox = Mailbox()
    listener.watch(mailbox)
    mailbox.put("wake")
    before = time.monotonic()
    listener.poll(PATIENCE_S)
    assert time.monotonic() - before < PATIENCE_S / 2
    assert listener.receive() == []
    mailbox.close()
