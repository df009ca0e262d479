"""What a transfer took and what became of its bytes: readings of one clock, and counts that agree on both sides."""

from kvtransfer.frames import FrameOptions
from kvtransfer.kv_messages import KvHeader
from kvtransfer.outgoing import TransferOutcome, TransferTimes
from kvtransfer.send_commands import FirstToken, Open, Ready
from kvtransfer.worker_facts import KvTraffic
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide, wait_until
from tests.kvtransfer.machine_world import TARGET, TICK, MachineWorld, Sender, no_fault
from tests.kvtransfer.raw_peers import KEY, RawPeer, running, token_frame
from tests.kvtransfer.samples import LAYOUT

NUM_TOKENS = 24
KV_BYTES = NUM_TOKENS * LAYOUT.num_layers * 2 * TOKEN_BYTES


def chunk(sender, start, stop, now) -> None:
    for layer in range(LAYOUT.num_layers):
        for part in (0, 1):
            for token in range(start, stop):
                sender.pool.write(KEY, layer, part, token, bytes(TOKEN_BYTES))
        sender.machine.apply(Ready(layer, ((KEY, stop),)), now)


def test_the_moments_are_the_first_frame_the_last_layer_and_the_last_word():
    world = MachineWorld(Sender(no_fault))
    (sender,) = world.senders
    world.now = 10.0
    world.expect(KEY, NUM_TOKENS)
    sender.pool.allocate(KEY, NUM_TOKENS)
    sender.machine.apply(Open(KEY, TARGET, NUM_TOKENS), world.now)
    chunk(sender, 0, 8, now=11.0)
    while not any(isinstance(message, KvHeader) for message in sender.outlet.sent):
        started_at = world.now
        world.turn()
    world.now = 20.0
    chunk(sender, 8, NUM_TOKENS, now=20.0)
    world.now = 25.0
    sender.machine.apply(FirstToken(KEY, 7), 25.0)
    world.run()
    (end,) = sender.ends
    assert end.outcome is TransferOutcome.DONE
    assert (end.times.started_at, end.times.ready_at) == (started_at, 20.0)
    assert end.times.taken_at == world.now - TICK >= 25.0


def test_nothing_sent_has_no_start():
    world = MachineWorld(Sender(no_fault))
    world.expect(KEY, NUM_TOKENS, NUM_TOKENS)
    world.senders[0].send_all(KEY, NUM_TOKENS, now=3.0)
    world.run()
    (end,) = world.senders[0].ends
    assert end.times == TransferTimes(ready_at=3.0, started_at=None, taken_at=end.times.taken_at)


def test_both_sides_count_the_same_bytes():
    world = MachineWorld(Sender(no_fault))
    world.expect(KEY, NUM_TOKENS, 4)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.run()
    num_bytes = KV_BYTES * 20 // 24
    assert world.senders[0].machine.traffic == world.machine.traffic == KvTraffic(num_bytes=num_bytes)


def test_what_was_lost_or_damaged_is_counted_where_it_is_seen():
    seen: list = []

    def fault(message, body):
        if isinstance(message, KvHeader):
            seen.append(message)
            if len(seen) == 2:
                return []
            if len(seen) == 5:
                return [(message, type(body)(body.v, body.k))]
        return [(message, body)]

    world = MachineWorld(Sender(fault, options=FrameOptions(with_checksum=True)), window=16 * TOKEN_BYTES)
    world.expect(KEY, NUM_TOKENS)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.run()
    sent, taken = world.senders[0].machine.traffic, world.machine.traffic
    assert taken.num_bytes == KV_BYTES
    assert (taken.num_corrupt, taken.num_late) == (1, 0)
    assert taken.num_resends >= 2
    assert sent.num_bytes == KV_BYTES + sent.num_resent_bytes
    assert sent.num_resent_bytes >= 2 * 2 * TOKEN_BYTES


def test_workers_report_it_while_their_threads_run():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, NUM_TOKENS)
        prefill.send_all(KEY, decode.target, NUM_TOKENS)
        decode.end_of(KEY)
        prefill.end_of(KEY)
        assert prefill.sender.traffic == decode.receiver.traffic == KvTraffic(num_bytes=KV_BYTES)
        raw = RawPeer(decode)
        raw.send(*token_frame(("nobody", 0), 0, 0))
        wait_until(lambda: decode.receiver.traffic.num_late == 1)
        raw.hangs_up()
