"""The grant's window: what is on its way stays within it whatever the receiver does, and memory with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_channel import KV_HWM
from kvtransfer.kv_messages import KvAbort, KvFirstToken, KvHeader
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.send_commands import Abort, Open
from kvtransfer.send_machine import MAX_ABORTS
from tests.kvtransfer import memory_process
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide, wait_until
from tests.kvtransfer.machine_world import TARGET, MachineWorld, Sender, no_fault
from tests.kvtransfer.raw_peers import KEY, running
from tests.kvtransfer.samples import LAYOUT

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_TOKENS = 24
MAX_GROWTH = 24 << 20


class Gate:
    """Holds up each splice while it is shut; what came in meanwhile waits."""

    def __init__(self, decode: DecodeSide) -> None:
        self.is_open = False
        self.num_spliced = 0
        self._splice = decode.pool.splice
        decode.pool.splice = self

    def __call__(self, key, header, body) -> None:
        wait_until(lambda: self.is_open)
        self._splice(key, header, body)
        self.num_spliced += 1


@pytest.mark.parametrize("tokens_a_window", [1, 3, 8])
def test_a_receiver_that_stands_still_gets_a_window_and_no_more(tokens_a_window):
    window = tokens_a_window * 2 * TOKEN_BYTES
    with running(PrefillSide(), DecodeSide(window=window)) as (prefill, decode):
        gate = Gate(decode)
        send, sent = prefill.sender._dialer.send, []

        def recording(peer, message, body=None):
            sent.append(0 if body is None else len(body.k) + len(body.v))
            return send(peer, message, body)

        prefill.sender._dialer.send = recording
        decode.expect(KEY, prefill.peer, NUM_TOKENS)
        prefill.send_all(KEY, decode.target, NUM_TOKENS)
        wait_until(lambda: sum(sent) == window)
        with pytest.raises(AssertionError, match="waited in vain"):
            wait_until(lambda: sum(sent) > window, seconds=0.3)
        assert gate.num_spliced == 0
        gate.is_open = True
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        assert prefill.end_of(KEY).outcome is TransferOutcome.DONE
        assert sum(sent) == NUM_TOKENS * LAYOUT.num_layers * 2 * TOKEN_BYTES


def test_a_window_is_far_less_than_the_sockets_queue_would_let_through():
    assert KV_HWM * 2 * memory_process.MAX_BODY_BYTES > 32 * memory_process.WINDOW


def test_memory_stays_within_bounds_while_much_more_goes_through_a_small_window():
    """256 MiB through a window of 4 MiB into a receiver that keeps falling behind, in two processes."""
    command = [sys.executable, "-m", "tests.kvtransfer.memory_process"]
    receiver = subprocess.Popen([*command, "receive"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        endpoint = json.loads(receiver.stdout.readline())
        sender = subprocess.run(
            [*command, "send", endpoint], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=True
        )
        received = json.loads(receiver.stdout.readline())
        assert receiver.wait(timeout=10) == 0
    finally:
        receiver.kill()
        receiver.wait()
        receiver.stdout.close()
    grown = {"sender": json.loads(sender.stdout)["growth"], "receiver": received["growth"]}
    print({name: f"{num_bytes / (1 << 20):.1f} MiB" for name, num_bytes in grown.items()})
    assert received["spliced"] > memory_process.TOTAL_BYTES >= 256 << 20
    assert max(grown.values()) < MAX_GROWTH


# --- what decode has already


@pytest.mark.parametrize("first_token", [1, 5, 16, NUM_TOKENS - 1])
def test_tokens_before_the_one_that_is_wanted_are_never_sent(first_token):
    world = MachineWorld(Sender(no_fault), window=4 * TOKEN_BYTES)
    world.expect(KEY, NUM_TOKENS, first_token)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.run()
    world.check_arrived(KEY)
    sent = [
        (header.layer, token)
        for header in world.senders[0].outlet.sent
        if isinstance(header, KvHeader)
        for token in range(header.start, header.stop)
    ]
    wanted = [(layer, token) for layer in range(LAYOUT.num_layers) for token in range(first_token, NUM_TOKENS)]
    assert sorted(sent) == wanted
    assert world.machine.counts.spliced_bytes == len(wanted) * 2 * TOKEN_BYTES


def test_a_prompt_that_decode_has_already_needs_its_first_token_only():
    world = MachineWorld(Sender(no_fault))
    world.expect(KEY, NUM_TOKENS, NUM_TOKENS)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.run()
    world.check_arrived(KEY)
    kinds = [type(message) for message in world.senders[0].outlet.sent]
    assert KvHeader not in kinds
    assert kinds.count(KvFirstToken) == 1


def test_on_real_sockets_too():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        for key, first_token in ((KEY, NUM_TOKENS), (("next", 0), NUM_TOKENS - 1)):
            decode.expect(key, prefill.peer, NUM_TOKENS, first_token)
            prefill.send_all(key, decode.target, NUM_TOKENS)
            end = decode.end_of(key)
            assert (end.outcome, end.first_token_id) == (ReceptionOutcome.ARRIVED, 7)
            assert prefill.end_of(key).outcome is TransferOutcome.DONE
        assert decode.receiver.counts.spliced_bytes == LAYOUT.num_layers * 2 * TOKEN_BYTES


def test_aborts_that_a_full_queue_does_not_take_are_bounded_and_said_once_it_does():
    sender = Sender(no_fault)
    for number in range(MAX_ABORTS + 3):
        sender.machine.apply(Open((f"r{number}", 0), TARGET, 4), 0.0)
    sender.outlet.send = lambda peer, message, body=None: False
    for number in range(MAX_ABORTS + 3):
        sender.machine.apply(Abort((f"r{number}", 0), "enough", tell_peer=True), 0.0)
    sender.machine.ship(0.0)
    del sender.outlet.send
    sender.outlet.sent.clear()
    sender.machine.ship(0.0)
    said = [message.request_id for message in sender.outlet.sent if isinstance(message, KvAbort)]
    assert said == [f"r{number}" for number in range(3, MAX_ABORTS + 3)]
    sender.outlet.sent.clear()
    sender.machine.ship(0.0)
    assert sender.outlet.sent == []
