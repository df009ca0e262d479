"""Channels with keys, on real sockets: who gets in, under which name, and what happens to everybody else."""

import asyncio
import logging
import threading
import time

import pytest
import zmq

from kvtransfer import kv_channel
from kvtransfer.channel import ControlClient, ControlServer
from kvtransfer.codec import MAX_CONTROL_BYTES, encode
from kvtransfer.curve import OVERHEAD_BYTES, ZAP_DOMAIN, CurveKeys
from kvtransfer.errors import IdentityError, SettingsError
from kvtransfer.kv_channel import KvDialer, KvListener
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvDone, KvOffer
from kvtransfer.layout import KvBody
from kvtransfer.messages import GatewayBeat, Refused
from kvtransfer.sockets import endpoint_port
from tests.kvtransfer.key_world import claiming, idle_proxy, made_keys, raw_dealer
from tests.kvtransfer.test_channel import BEAT, HEADER, OFFER, free_endpoint, receive, say, until

SILENCE_S = 0.4
"""Long enough for a handshake on loopback many times over."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return made_keys(tmp_path_factory.mktemp("keys"), "gateway", "prefill", "prefill-9", "decode")


@pytest.fixture
def listener(keys):
    made = KvListener("127.0.0.1", 0, keys["decode"])
    yield made
    made.close()


@pytest.fixture
def dialer(keys):
    made = KvDialer("prefill-0/g1/n", keys["prefill"])
    yield made
    made.close()


def pair_of(keys: CurveKeys) -> tuple[bytes, bytes]:
    return keys.public_key, keys.secret_key


def with_server(keys, scenario, port: int = 0):
    """Runs `scenario(server)` in an event loop around a ControlServer with keys."""

    async def run() -> None:
        server = ControlServer("127.0.0.1", port, keys["gateway"])
        try:
            await asyncio.wait_for(scenario(server), 30)
        finally:
            server.close()

    asyncio.run(run())


async def hears_nothing(server) -> bool:
    try:
        await asyncio.wait_for(server.receive(), SILENCE_S)
    except TimeoutError:
        return True
    return False


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- whoever has a key


def test_kv_goes_through_up_to_the_largest_frame(listener, dialer):
    dialer.dial("decode-0", listener.endpoint)
    body = bytes(range(256)) * (MAX_BODY_BYTES // 256)
    say(dialer, "decode-0", OFFER)
    say(dialer, "decode-0", HEADER, KvBody(memoryview(body), memoryview(body)))
    assert receive(listener) == (b"prefill-0/g1/n", OFFER, None)
    link, message, received = receive(listener)
    assert (link, message) == (b"prefill-0/g1/n", HEADER)
    assert bytes(received.k) == bytes(received.v) == body
    say(listener, link, KvDone("r", 0))
    assert receive(dialer) == [("decode-0", KvDone("r", 0))]


def test_a_frame_above_the_bound_costs_its_sender_the_link(listener, keys):
    pair, server_key = pair_of(keys["prefill"]), keys["decode"].public_key
    with raw_dealer(listener.endpoint, b"prefill-0/g1/n", pair, server_key) as raw:
        raw.send(encode(OFFER))
        assert receive(listener)[1] == OFFER
        raw.send_multipart([encode(HEADER), bytes(MAX_BODY_BYTES + 1), b""])
        assert receive(listener, SILENCE_S) is None


def test_control_messages_go_both_ways(keys):
    async def scenario(server) -> None:
        client = ControlClient("prefill-0/g1/n", [server.endpoint], keys["prefill"])
        assert until(lambda: client.send(server.endpoint, BEAT))
        assert await server.receive() == ("prefill-0/g1/n", BEAT)
        assert server.send("prefill-0/g1/n", GatewayBeat("e", 0))
        assert receive(client) == [(server.endpoint, GatewayBeat("e", 0))]
        client.close()

    with_server(keys, scenario)


def test_every_socket_is_encrypted_and_every_server_insists_on_being_asked(listener, dialer, keys):
    dialer.dial("decode-0", listener.endpoint)
    client = ControlClient("prefill-0/g1/n", [listener.endpoint], keys["prefill"])
    sockets = (dialer._lines["decode-0"].socket, client._lines[listener.endpoint].socket)
    try:
        for socket, max_frame in zip(sockets, (MAX_BODY_BYTES, MAX_CONTROL_BYTES), strict=True):
            assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
            assert socket.getsockopt(zmq.MAXMSGSIZE) == max_frame + OVERHEAD_BYTES
    finally:
        client.close()

    async def scenario(server) -> None:
        for socket, max_frame in ((server._socket, MAX_CONTROL_BYTES), (listener._socket, MAX_BODY_BYTES)):
            assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
            assert socket.getsockopt(zmq.CURVE_SERVER) == 1
            assert socket.getsockopt(zmq.ZAP_DOMAIN) == ZAP_DOMAIN
            assert socket.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1
            assert socket.getsockopt(zmq.MAXMSGSIZE) == max_frame + OVERHEAD_BYTES

    with_server(keys, scenario)


def test_the_wire_shows_nothing_of_what_is_said(listener, keys):
    """And it does in clear: the proxy looks at the right bytes."""
    word = "a-word-that-is-nowhere-else"
    for security in (keys["decode"], None):
        other = KvListener("127.0.0.1", 0, security)
        with idle_proxy(other.endpoint) as proxy:
            dialer = KvDialer("prefill-0/g1/n", security and keys["prefill"])
            dialer.dial("decode-0", proxy.endpoint)
            say(dialer, "decode-0", KvOffer(word, 0, 4))
            assert receive(other)[1] == KvOffer(word, 0, 4)
            dialer.close()
            assert (word.encode() in proxy.seen) is (security is None)
        other.close()


def test_the_thread_that_lets_peers_in_ends_with_its_server(keys):
    before = threading.active_count()
    listener = KvListener("127.0.0.1", 0, keys["decode"])
    assert threading.active_count() == before + 1
    listener.close()
    assert until(lambda: threading.active_count() == before)


# --- whoever has none, or another


def stranger() -> tuple[bytes, bytes]:
    return zmq.curve_keypair()


def test_an_unknown_key_does_not_get_in_and_is_one_line_in_the_log(listener, keys, caplog):
    for _ in range(3):
        with raw_dealer(listener.endpoint, b"prefill-0/g1/n", stranger(), keys["decode"].public_key) as raw:
            raw.send(encode(OFFER))
            assert receive(listener, SILENCE_S) is None
    assert warnings(caplog) == ["a peer at 127.0.0.1 was turned away: its key may not connect here"]


def test_an_unknown_key_does_not_get_in_at_the_gateway(keys):
    async def scenario(server) -> None:
        with raw_dealer(server.endpoint, b"prefill-0/g1/n", stranger(), keys["gateway"].public_key) as raw:
            raw.send(encode(BEAT))
            assert await hears_nothing(server)

    with_server(keys, scenario)


def test_without_a_key_nobody_gets_in(listener, keys):
    with raw_dealer(listener.endpoint, b"prefill-0/g1/n") as raw:
        raw.send(encode(OFFER))
        assert receive(listener, SILENCE_S) is None

    async def scenario(server) -> None:
        with raw_dealer(server.endpoint, b"prefill-0/g1/n") as raw:
            raw.send(encode(BEAT))
            assert await hears_nothing(server)

    with_server(keys, scenario)


@pytest.mark.parametrize("name", ["gateway", "decode"])
def test_keys_of_roles_that_send_no_kv_do_not_get_in_at_decode(listener, keys, name):
    with raw_dealer(listener.endpoint, b"decode-0/g1/n", pair_of(keys[name]), keys["decode"].public_key) as raw:
        raw.send(encode(OFFER))
        assert receive(listener, SILENCE_S) is None


def test_the_gateways_key_is_no_workers(keys):
    async def scenario(server) -> None:
        pair, server_key = pair_of(keys["gateway"]), keys["gateway"].public_key
        with raw_dealer(server.endpoint, b"gateway-0/g1/n", pair, server_key) as raw:
            raw.send(encode(BEAT))
            assert await hears_nothing(server)

    with_server(keys, scenario)


class DeadHandler:
    """In the place of the thread that answers libzmq's questions: nobody does."""

    def __init__(self, context, admitted) -> None:
        pass


def test_while_nobody_can_say_who_gets_in_nobody_does(keys, monkeypatch):
    monkeypatch.setattr(kv_channel, "ZapHandler", DeadHandler)
    listener, dialer = KvListener("127.0.0.1", 0, keys["decode"]), KvDialer("prefill-0/g1/n", keys["prefill"])
    try:
        dialer.dial("decode-0", listener.endpoint)
        say(dialer, "decode-0", OFFER)
        assert receive(listener, SILENCE_S) is None
        assert isinstance(receive(dialer)[0][1], Refused)
    finally:
        dialer.close()
        listener.close()


# --- names


@pytest.mark.parametrize("name", [b"decode-0/g1/n", b"prefill-9/g1/n", b"prefillx/g1", b"\xff\xfe", b"/", b"x" * 255])
def test_a_name_that_is_another_keys_is_refused_at_decode(listener, keys, name):
    with raw_dealer(listener.endpoint, name, pair_of(keys["prefill"]), keys["decode"].public_key) as raw:
        raw.send(encode(OFFER))
        link, message, body = receive(listener)
        assert (link, body) == (name, None)
        assert isinstance(message, IdentityError)
        assert len(str(message)) <= 256


@pytest.mark.parametrize(("worker_id", "owns"), [("prefill-0", True), ("decode-0", False), ("prefill-9", False)])
def test_a_name_that_is_another_keys_is_refused_at_the_gateway(keys, worker_id, owns):
    async def scenario(server) -> None:
        name = f"{worker_id}/g1/n"
        pair, server_key = pair_of(keys["prefill"]), keys["gateway"].public_key
        with raw_dealer(server.endpoint, name.encode(), pair, server_key) as raw:
            raw.send(encode(BEAT))
            sender, message = await server.receive()
            assert sender == name
            if owns:
                assert message == BEAT
            else:
                assert isinstance(message, IdentityError)
                assert str(message) == f"the key of prefill does not speak for worker {worker_id!r}"

    with_server(keys, scenario)


def test_a_peer_without_a_public_key_here_is_not_dialled(dialer):
    with pytest.raises(SettingsError, match="no public key speaks for node7"):
        dialer.dial("node7", free_endpoint())


# --- handshakes that fail


def test_a_wrong_server_key_is_tried_with_growing_delays_and_said_once(keys, caplog):
    async def scenario(server) -> None:
        with idle_proxy(server.endpoint) as proxy:
            client = ControlClient("prefill-0/g1/n", [proxy.endpoint], claiming(keys["prefill"], keys["prefill-9"]))
            end = time.monotonic() + 3.0
            while time.monotonic() < end:
                client.poll(0.05)
                assert client.receive() == []
                assert not client.send(proxy.endpoint, BEAT)
            client.close()
            assert 4 <= proxy.num_connections <= 8  # libzmq by itself: 30
        assert [line.partition(":")[0] for line in warnings(caplog)] == [f"gateway {proxy.endpoint.partition(':')[0]}"]

    with_server(keys, scenario)


def tended(client, gateway: str, seconds: float) -> bool:
    """Whether `client` gets a message off within so long, as a worker's control thread would try."""

    def sent() -> bool:
        client.poll(0.02)
        client.receive()
        return client.send(gateway, BEAT)

    return until(sent, seconds)


def test_who_is_let_in_later_gets_in_without_a_restart(keys, tmp_path, caplog):
    strict = made_keys(tmp_path, "gateway")["gateway"]
    known = {**strict.known, "prefill": keys["prefill"].public_key}
    knowing = CurveKeys(strict.name, strict.public_key, strict.secret_key, known)
    server = _SyncServer(strict)
    client = ControlClient("prefill-0/g1/n", [server.endpoint], claiming(keys["prefill"], strict))
    try:
        assert not tended(client, server.endpoint, 1.0)
        refusals = [line for line in warnings(caplog) if line.startswith("gateway")]
        assert len(refusals) == 1
        assert refusals[0].endswith("our key may not connect there")
        server.restart(knowing)
        assert tended(client, server.endpoint, 8.0)
    finally:
        client.close()
        server.close()


class _SyncServer:
    """A ControlServer whose messages nobody reads."""

    def __init__(self, security: CurveKeys) -> None:
        self._loop = asyncio.new_event_loop()
        self._server = self._made(0, security)
        self.endpoint = self._server.endpoint

    def _made(self, port: int, security: CurveKeys) -> ControlServer:
        async def make() -> ControlServer:
            return ControlServer("127.0.0.1", port, security)

        return self._loop.run_until_complete(make())

    def restart(self, security: CurveKeys) -> None:
        self._server.close()
        self._server = self._made(endpoint_port(self.endpoint), security)

    def close(self) -> None:
        self._server.close()
        self._loop.close()


@pytest.mark.parametrize("how", ["unknown key", "wrong server key", "server without keys", "no key here"])
def test_a_kv_link_that_cannot_be_made_is_refused_once_and_takes_nothing_more(how, keys, listener):
    stranger_keys = CurveKeys("prefill", *stranger(), known=keys["prefill"].known)
    security = {
        "unknown key": stranger_keys,
        "wrong server key": claiming(keys["prefill"], keys["prefill-9"]),
        "server without keys": keys["prefill"],
        "no key here": None,
    }[how]
    clear = KvListener("127.0.0.1", 0)
    dialer = KvDialer("prefill-0/g1/n", security)
    target = clear if how == "server without keys" else listener
    try:
        with idle_proxy(target.endpoint) as proxy:
            dialer.dial("decode-0", proxy.endpoint)
            assert say(dialer, "decode-0", OFFER)
            [(peer, refusal)] = receive(dialer)
            assert peer == "decode-0"
            assert isinstance(refusal, Refused)
            num_connections = proxy.num_connections
            assert num_connections <= 4
            assert not say(dialer, "decode-0", OFFER)
            assert not dialer.has_room("decode-0")
            dialer.poll(0.0)
            assert receive(dialer, SILENCE_S) is None
            assert proxy.num_connections == num_connections
            dialer.hang_up("decode-0")
            dialer.dial("decode-0", proxy.endpoint)
            assert isinstance(receive(dialer)[0][1], Refused)
    finally:
        dialer.close()
        clear.close()


# --- idle


@pytest.mark.parametrize("is_secure", [False, True], ids=["clear", "keys"])
def test_links_survive_long_silence_behind_a_firewall_that_drops_what_is_idle(keys, is_secure):
    """libzmq's heartbeats are the only thing said for several times the patience of the firewall and of the peers."""
    listener = KvListener("127.0.0.1", 0, keys["decode"] if is_secure else None)
    dialer = KvDialer("prefill-0/g1/n", keys["prefill"] if is_secure else None)
    try:
        with idle_proxy(listener.endpoint, idle_s=1.0) as proxy:
            dialer.dial("decode-0", proxy.endpoint)
            say(dialer, "decode-0", OFFER)
            link = receive(listener)[0]
            time.sleep(4.0)
            say(listener, link, KvDone("r", 0))
            assert receive(dialer) == [("decode-0", KvDone("r", 0))]
            say(dialer, "decode-0", OFFER)
            assert receive(listener) == (link, OFFER, None)
            assert (proxy.num_connections, proxy.num_dropped) == (1, 0)
            dialer.close()
    finally:
        listener.close()


def test_the_firewall_of_that_test_does_drop_what_is_idle(keys):
    listener = KvListener("127.0.0.1", 0, keys["decode"])
    try:
        with idle_proxy(listener.endpoint, idle_s=0.3) as proxy:
            pair, server_key = pair_of(keys["prefill"]), keys["decode"].public_key
            with raw_dealer(proxy.endpoint, b"prefill-0/g1/n", pair, server_key) as raw:
                raw.send(encode(OFFER))
                assert receive(listener)[1] == OFFER
                time.sleep(0.4)
                raw.send(encode(OFFER))
                assert receive(listener, SILENCE_S) is None
                assert proxy.num_dropped >= 1
    finally:
        listener.close()
