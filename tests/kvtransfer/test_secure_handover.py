"""Whole hand-overs and registrations with keys: they work, and where keys don't fit they fail at once and say why."""

from functools import partial

import pytest

from kvtransfer.channel import ControlClient
from kvtransfer.control import GatewayLinks, LinkTiming
from kvtransfer.curve import CurveKeys
from kvtransfer.errors import SettingsError
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_channel import KvListener
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Heartbeat, Hello
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.sockets import endpoint_port
from kvtransfer.worker_facts import LeaveCause
from tests.kvtransfer.control_world import HELLO, OUTPUT, Gateway, World, in_loop
from tests.kvtransfer.fake_pools import DecodeSide, PrefillSide, wait_until
from tests.kvtransfer.key_world import made_keys
from tests.kvtransfer.raw_peers import KEY, running


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return made_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Keys of another cluster, under the same names."""
    return made_keys(tmp_path_factory.mktemp("others"))


def decode_with(security: CurveKeys, **settings) -> DecodeSide:
    return DecodeSide(listener_type=partial(KvListener, security=security), **settings)


def test_a_hand_over_with_keys(keys):
    with running(PrefillSide(security=keys["prefill"]), decode_with(keys["decode"])) as (prefill, decode):
        for number in range(3):
            key = (f"r{number}", 0)
            decode.expect(key, prefill.peer, 6)
            prefill.send_all(key, decode.target, 6)
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            assert prefill.end_of(key).outcome is TransferOutcome.DONE


def test_a_hand_over_to_the_wrong_cluster_fails_at_once(keys, others, caplog):
    """Well before the lease runs out, and the decode worker has not heard a word."""
    with running(PrefillSide(security=others["prefill"]), decode_with(keys["decode"])) as (prefill, decode):
        prefill.send_all(KEY, decode.target, 4)
        end = prefill.end_of(KEY)
        assert end.outcome is TransferOutcome.FAILED
        assert end.reason.startswith("the handshake breaks off; has the other side another key")
        assert decode.receiver.num_dropped == 0
    assert caplog.text.count("decode worker decode-0 refused our KV") == 1


def test_when_decode_comes_back_with_other_keys_what_was_under_way_fails_and_the_next_one_works(keys, others):
    first = decode_with(keys["decode"])
    port = endpoint_port(first.listener.endpoint)
    with running(PrefillSide(security=keys["prefill"])) as prefill:
        first.expect(KEY, prefill.peer, 4)
        prefill.open(KEY, first.target, 4)
        targets = prefill.sender._machine._peers
        wait_until(lambda: any(targets[name].is_welcome for name in targets))
        first.receiver.stop()
        with running(decode_with(others["decode"], port=port)):
            assert prefill.end_of(KEY).outcome is TransferOutcome.FAILED
        with running(decode_with(keys["decode"], port=port, generation="g3")) as decode:
            again = ("again", 0)
            decode.expect(again, prefill.peer, 4)
            prefill.send_all(again, decode.target, 4)
            assert decode.end_of(again).outcome is ReceptionOutcome.ARRIVED
            assert prefill.end_of(again).outcome is TransferOutcome.DONE
    first.events.close()


@in_loop
async def test_a_worker_registers_and_speaks_with_keys(keys):
    gateway = Gateway(security=keys["gateway"])
    worker = World([gateway.endpoint], dead_after=30.0, security=keys["prefill"])
    try:
        await gateway.welcome()
        worker.links.send(gateway.endpoint, [OUTPUT])
        await gateway.hear(Heartbeat)
    finally:
        worker.links.leave("the test is over", LeaveCause.SHUTDOWN)
        worker.inbox.close()
        gateway.close()


@in_loop
async def test_a_worker_with_the_wrong_key_is_not_heard_and_keeps_trying(keys, others, caplog):
    gateway = Gateway(security=keys["gateway"])
    worker = World([gateway.endpoint], dead_after=30.0, security=others["prefill"])
    try:
        assert await gateway.hears_no(Hello, 2.0)
        assert worker.links.is_alive()
        assert worker.told_nothing_more()
    finally:
        worker.links.leave("the test is over", LeaveCause.SHUTDOWN)
        worker.inbox.close()
        gateway.close()
    assert caplog.text.count("can't be connected to, trying on") == 1


def test_a_worker_without_the_gateways_key_does_not_start(tmp_path):
    keys = made_keys(tmp_path, "prefill")["prefill"]
    inbox: Mailbox = Mailbox()
    dial = partial(ControlClient, security=keys)
    with pytest.raises(SettingsError, match="no public key speaks for gateway"):
        GatewayLinks(HELLO, ["tcp://127.0.0.1:9"], LinkTiming(0.1, 1.0), inbox, 64, dial)
    inbox.close()
