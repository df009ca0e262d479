"""How long decode may take to take KV over: as long as it is heard of. Silence ends a transfer, slowness does not."""

import pytest

from kvtransfer.kv_messages import KvAbort, KvCredit, KvDone, KvGrant, KvResend
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.send_commands import FirstToken, Open
from prefill.scheduler import OpenTransfer, SendFirstToken
from tests.kvtransfer.fake_pools import TOKEN_BYTES
from tests.kvtransfer.machine_world import KEEPALIVE, LEASE, TARGET, TICK, MachineWorld, Sender, no_fault
from tests.kvtransfer.raw_peers import KEY
from tests.lifecycle.makers import Prefill, outputs_of

OTHER = ("other", 0)
REASON = "decode did not take the KV within 4 s"


def granted(*keys) -> Sender:
    """All of each transfer is computed at 0.0, and sent."""
    sender = Sender(no_fault, patience=LEASE)
    for key in keys:
        sender.send_all(key, 4)
        say(sender, KvGrant(*key, 0, 1 << 20), 0.0)
    sender.machine.ship(0.0)
    return sender


def say(sender, message, now) -> None:
    sender.machine.on_message(TARGET.worker_id, message, now)


def wait(sender, start, stop) -> float | None:
    """Lets time pass, and returns when a transfer ended."""
    now = start
    while now < stop:
        now += TICK
        sender.machine.ship(now)
        if sender.ends:
            return now
    return None


def test_a_slow_transfer_takes_many_leases_and_arrives():
    world = MachineWorld(Sender(no_fault, patience=LEASE), window=TOKEN_BYTES)
    world.expect(KEY, 240)
    world.senders[0].send_all(KEY, 240)
    world.run()
    assert world.now > 3 * LEASE
    world.check_arrived(KEY)
    assert [end.outcome for end in world.senders[0].ends] == [TransferOutcome.DONE]


def test_silence_for_a_lease_ends_it_and_decode_is_told():
    sender = granted(KEY)
    assert wait(sender, 0.0, LEASE) is None
    assert wait(sender, LEASE, LEASE + 2 * KEEPALIVE) is not None
    [end] = sender.ends
    assert (end.key, end.outcome, end.reason) == (KEY, TransferOutcome.FAILED, REASON)
    sender.machine.ship(LEASE + 3 * KEEPALIVE)  # the link is idle by now: the abort goes first
    assert sender.outlet.sent.count(KvAbort(*KEY, reason=REASON)) == 1
    assert len(sender.machine) == 0


def test_an_offer_that_is_never_granted_counts_from_the_first_token():
    sender = Sender(no_fault, patience=LEASE)
    sender.machine.apply(Open(KEY, TARGET, 4), 0.0)
    assert wait(sender, 0.0, 10 * LEASE) is None, "prefill itself may take its time"
    sender.machine.apply(FirstToken(KEY, 7), 10 * LEASE)
    assert wait(sender, 10 * LEASE, 11 * LEASE) is None
    assert wait(sender, 11 * LEASE, 11 * LEASE + 2 * KEEPALIVE) is not None


@pytest.mark.parametrize(
    "word",
    [KvGrant(*KEY, 0, 1 << 20), KvCredit(*KEY, settled_bytes=0), KvResend(*KEY, layer=0, start=0, number=1)],
    ids=["grant", "credit", "resend"],
)
def test_each_word_about_it_renews_the_wait(word):
    sender = granted(KEY)
    assert wait(sender, 0.0, LEASE - TICK) is None
    say(sender, word, LEASE - TICK)
    assert wait(sender, LEASE - TICK, 2 * LEASE - TICK) is None
    assert wait(sender, 2 * LEASE - TICK, 2 * LEASE + 2 * KEEPALIVE) is not None


def test_words_about_another_transfer_do_not():
    sender = granted(KEY, OTHER)
    for now in range(1, int(LEASE) + 2):
        say(sender, KvCredit(*OTHER, settled_bytes=0), float(now))
        sender.machine.ship(float(now))
    assert [end.key for end in sender.ends] == [KEY]
    say(sender, KvDone(*OTHER), LEASE + 2)
    assert [end.outcome for end in sender.ends] == [TransferOutcome.FAILED, TransferOutcome.DONE]


def test_the_request_of_a_silent_transfer_fails_and_its_blocks_come_back():
    world, sender = Prefill(), Sender(no_fault, patience=LEASE)
    world.add(num_prompt=4)
    world.step(now=1.0)
    for command in world.scheduler.take_commands():
        match command:
            case OpenTransfer(job):
                sender.machine.apply(Open(job.key, TARGET, job.num_prefill), 0.0)
            case SendFirstToken(key, token_id):
                sender.machine.apply(FirstToken(key, token_id), 1.0)
    outputs_of(world)
    ended_at = wait(sender, 1.0, 3 * LEASE)
    world.scheduler.transfer_ended(sender.ends[0], ended_at)
    [said] = world.scheduler.take_outputs()
    assert said.output.end.message == f"the KV transfer ended early: {REASON}"
    world.check_all_is_empty()
