"""A prefill worker with a link for each shard of its KV heads, and decode workers that take all of them."""

import pytest

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.frames import FrameOptions
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_messages import KvAbort, KvDone, KvFirstToken, KvGrant, KvHeader, KvHello, KvOffer, KvRevoke
from kvtransfer.layout import KvBody
from kvtransfer.messages import Refused
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.receive_commands import Expect
from kvtransfer.send_commands import Abort
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, content, wait_until
from tests.kvtransfer.machine_world import HEAD_BYTES, MachineWorld, Sender, no_fault
from tests.kvtransfer.raw_peers import KEY, RawPeer, running
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

NUM_TOKENS = 24
WINDOW = 8 * TOKEN_BYTES
LINKS = (b"prefill-7/g7/a", b"prefill-7/g7/b")


def shards(*faults) -> MachineWorld:
    """A worker whose KV heads are spread over two processes."""
    halves = zip(faults, ((0, 1), (1, 2)), strict=True)
    senders = [Sender(fault, heads, options=FrameOptions(with_checksum=True)) for fault, heads in halves]
    return MachineWorld(*senders, window=WINDOW)


def hello(heads) -> KvHello:
    return KvHello(PROTOCOL_VERSION, "prefill-7", "g7", FINGERPRINT, LAYOUT, *heads)


def frame(head, layer, token) -> tuple[KvHeader, KvBody]:
    """One head of one token."""
    parts = (content(KEY, layer, part, token)[head * HEAD_BYTES : (head + 1) * HEAD_BYTES] for part in (0, 1))
    return KvHeader(*KEY, layer, token, token + 1, head, head + 1, LAYOUT.dtype), KvBody(*map(memoryview, parts))


class ShardPeer(RawPeer):
    """One process of a sharded prefill worker, which says whatever it likes."""

    def __init__(self, decode: DecodeSide, head: int) -> None:
        super().__init__(decode, link=f"prefill-7/g7/{head}", hello=False)
        self.head = head
        self.send(hello((head, head + 1)))
        self.hear()


# --- all goes well


@pytest.mark.parametrize("first_token", [0, 20, NUM_TOKENS])
def test_two_shards_of_one_worker_make_a_whole(first_token):
    world = shards(no_fault, no_fault)
    world.expect(KEY, NUM_TOKENS, first_token)
    for sender in world.senders:
        sender.send_all(KEY, NUM_TOKENS)
    world.run()
    world.check_arrived(KEY)
    for sender in world.senders:
        headers = [message for message in sender.outlet.sent if isinstance(message, KvHeader)]
        assert {(header.head_start, header.head_stop) for header in headers} <= {sender.heads}
        assert sum(header.stop - header.start for header in headers) == 2 * (NUM_TOKENS - first_token)
        assert [end.outcome for end in sender.ends] == [TransferOutcome.DONE]


def test_one_shards_losses_are_that_shards_to_send_again():
    lost = iter((2, 5))
    at = [next(lost), 0]

    def fault(message, body):
        if isinstance(message, KvHeader):
            at[1] += 1
            if at[1] == at[0]:
                at[0] = next(lost, 0)
                return []
        return [(message, body)]

    world = shards(no_fault, fault)
    world.expect(KEY, NUM_TOKENS)
    for sender in world.senders:
        sender.send_all(KEY, NUM_TOKENS)
    world.run()
    world.check_arrived(KEY)
    clean, lossy = ([m for m in sender.outlet.sent if isinstance(m, KvHeader)] for sender in world.senders)
    assert {header.resend for header in clean} == {0}
    assert {header.resend for header in lossy} > {0}


def test_nothing_is_granted_before_all_heads_are_offered():
    world = shards(no_fault, no_fault)
    world.expect(KEY, NUM_TOKENS)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    for _ in range(30):
        world.turn()
    assert [word for word in world.said if isinstance(word, KvGrant)] == []
    world.senders[1].send_all(KEY, NUM_TOKENS)
    world.run()
    world.check_arrived(KEY)


def test_offers_of_all_shards_may_come_before_the_request():
    world = shards(no_fault, no_fault)
    for sender in world.senders:
        sender.send_all(KEY, NUM_TOKENS)
    for _ in range(5):
        world.turn()
    world.expect(KEY, NUM_TOKENS)
    world.run()
    world.check_arrived(KEY)


def test_a_worker_that_dials_anew_before_its_request_comes_has_offered_once():
    with running(DecodeSide()) as decode:
        old = ShardPeer(decode, 0)
        old.send(KvOffer(*KEY, 1))
        wait_until(lambda: decode.receiver._machine._book._parked)
        new = RawPeer(decode, link="prefill-7/g7/again", hello=False)
        new.head = 0
        new.send(hello((0, 1)))
        new.hear()
        other = ShardPeer(decode, 1)
        for peer in (new, other):
            peer.send(KvOffer(*KEY, 1))
        wait_until(lambda: len(decode.receiver._machine._book._parked[old.peer][KEY]) == 2)
        decode.expect(KEY, old.peer, 1, first_token=1)
        for peer in (new, other):
            assert isinstance(peer.hear(), KvGrant)
            peer.send(KvFirstToken(*KEY, 7))
        assert [peer.hear() for peer in (new, other)] == [KvDone(*KEY)] * 2
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        for peer in (old, new, other):
            peer.hangs_up()


def test_parked_offers_that_contradict_each_other_cost_the_worker_its_link_and_nobody_the_receiver():
    world = MachineWorld()
    machine = world.machine
    machine.on_message(LINKS[0], hello((0, 1)), None, 0.0)
    machine.on_message(LINKS[0], KvOffer(*KEY, 4), None, 0.0)
    machine._peers.forget(LINKS[0])  # fell silent
    machine.on_message(LINKS[1], hello((0, 2)), None, 0.0)
    machine.on_message(LINKS[1], KvOffer(*KEY, 4), None, 0.0)
    machine.apply(Expect(KEY, ("prefill-7", "g7"), 4), 1.0)
    assert [end.outcome for end in world.ends] == [ReceptionOutcome.FAILED]
    assert len(machine) == 0


# --- ends


def test_a_shard_that_gives_up_ends_the_transfer_of_all():
    world = shards(no_fault, no_fault)
    world.expect(KEY, NUM_TOKENS)
    for sender in world.senders:
        sender.send_all(KEY, NUM_TOKENS)
    world.turn()
    world.senders[0].machine.apply(Abort(KEY, "out of luck", tell_peer=True), world.now)
    world.run()
    assert [(end.outcome, end.reason) for end in world.ends] == [(ReceptionOutcome.ABORTED, "out of luck")]
    assert [end.outcome for end in world.senders[0].ends] == [TransferOutcome.ABORTED]
    assert [(end.outcome, end.reason) for end in world.senders[1].ends] == [(TransferOutcome.REVOKED, "out of luck")]


def test_shards_on_real_sockets_are_done_together():
    with running(DecodeSide()) as decode:
        peers = [ShardPeer(decode, head) for head in (0, 1)]
        pool = decode.pool
        pool.splice = lambda key, header, body: splice_heads(pool, key, header, body)
        decode.expect(KEY, peers[0].peer, 1)
        for peer in peers:
            peer.send(KvOffer(*KEY, 1))
        for peer in peers:
            assert isinstance(peer.hear(), KvGrant)
            for layer in (0, 1):
                peer.send(*frame(peer.head, layer, 0))
        peers[0].send(KvFirstToken(*KEY, 7))
        peers[1].send(KvFirstToken(*KEY, 7))
        assert [peer.hear() for peer in peers] == [KvDone(*KEY)] * 2
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        for peer in peers:
            peer.hangs_up()


def splice_heads(pool, key, header, body) -> None:
    for part, view in enumerate((body.k, body.v)):
        old = bytearray(pool.read(key, header.layer, part, header.start))
        old[header.head_start * HEAD_BYTES : header.head_stop * HEAD_BYTES] = view
        pool.write(key, header.layer, part, header.start, bytes(old))


# --- breaches


def whole_width(peer):
    return KvHeader(*KEY, 0, 0, 1, 0, 2, LAYOUT.dtype), KvBody(*(memoryview(bytes(TOKEN_BYTES)) for _ in "kv"))


def the_others_head(peer):
    return frame(1 - peer.head, 0, 0)


def out_of_range(peer):
    header, body = frame(1, 0, 0)
    return KvHeader(*KEY, 0, 0, 1, 2, 3, header.dtype), body


@pytest.mark.parametrize("rectangle", [whole_width, the_others_head, out_of_range])
def test_heads_that_a_link_does_not_bring_are_a_breach_that_ends_the_transfer_of_all(rectangle):
    with running(DecodeSide()) as decode:
        peers = [ShardPeer(decode, head) for head in (0, 1)]
        decode.expect(KEY, peers[0].peer, 1)
        for peer in peers:
            peer.send(KvOffer(*KEY, 1))
        for peer in peers:
            assert isinstance(peer.hear(), KvGrant)
        peers[0].send(*rectangle(peers[0]))
        assert peers[0].hear() == Refused("the link broke the protocol", again=True)
        assert peers[1].hear() == KvRevoke(*KEY, "the prefill worker broke the protocol")
        assert decode.end_of(KEY).outcome is ReceptionOutcome.FAILED
        for peer in peers:
            peer.hangs_up()


def test_shards_that_disagree_about_the_first_token_are_in_breach():
    with running(DecodeSide()) as decode:
        peers = [ShardPeer(decode, head) for head in (0, 1)]
        decode.expect(KEY, peers[0].peer, 1, first_token=1)
        for peer in peers:
            peer.send(KvOffer(*KEY, 1))
        for peer in peers:
            assert isinstance(peer.hear(), KvGrant)
        peers[0].send(KvFirstToken(*KEY, 7))
        peers[1].send(KvFirstToken(*KEY, 8))
        assert decode.end_of(KEY).outcome is ReceptionOutcome.FAILED
        for peer in peers:
            peer.hangs_up()


@pytest.mark.parametrize(("heads", "says"), [((0, 2), "on another link"), ((1, 3), "[1, 3) of 2"), ((1, 1), "[1, 1)")])
def test_links_for_heads_that_are_taken_or_do_not_exist_are_refused(heads, says):
    with running(DecodeSide()) as decode:
        first = ShardPeer(decode, 0)
        late = RawPeer(decode, link="prefill-7/g7/late", hello=False)
        late.send(hello(heads))
        refused = late.hear()
        assert isinstance(refused, Refused)
        assert says in refused.reason
        for peer in (first, late):
            peer.hangs_up()


def test_a_shard_that_dials_anew_ends_what_it_had_offered_and_a_new_one_does_not():
    with running(DecodeSide()) as decode:
        old = ShardPeer(decode, 0)
        decode.expect(KEY, old.peer, 1)
        old.send(KvOffer(*KEY, 1))
        other = ShardPeer(decode, 1)
        other.send(KvOffer(*KEY, 1))
        assert [isinstance(peer.hear(), KvGrant) for peer in (old, other)] == [True, True]
        again = RawPeer(decode, link="prefill-7/g7/again", hello=False)
        again.send(hello((0, 1)))
        again.hear()
        end = decode.end_of(KEY)
        assert (end.outcome, end.reason) == (
            ReceptionOutcome.FAILED,
            "the prefill worker was restarted or dialled anew",
        )
        assert other.hear() == KvRevoke(*KEY, end.reason)
        again.send(KvAbort(*KEY, "late"))
        for peer in (old, other, again):
            peer.hangs_up()
