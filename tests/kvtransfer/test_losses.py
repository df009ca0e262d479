"""Hand-overs through restarts, silence, lost words, full queues and idle links."""

import time

from kvtransfer import incoming as incoming_module
from kvtransfer import receive_machine as machine_module
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_channel import KvListener
from kvtransfer.kv_messages import KvAbort, KvCredit, KvDone, KvGrant, KvOffer, KvRevoke
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.sockets import endpoint_port
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide, wait_until
from tests.kvtransfer.raw_peers import KEY, RawPeer, running

# --- restarts, silence, losses


def test_a_restarted_decode_worker_is_dialled_anew():
    with running(PrefillSide(keepalive=0.1)) as prefill:
        old = DecodeSide(generation="old")
        with running(old):
            old.expect(KEY, prefill.peer, 8)
            prefill.open(KEY, old.target, 8)
            prefill.compute(KEY, 4)
            wait_until(lambda: old.receiver._machine._ends._first_frame_at)
            old.receiver.close(KEY, "crash")
            old.end_of(KEY)
            prefill.end_of(KEY)
            prefill.open(("open at the crash", 0), old.target, 8)
        with running(DecodeSide(generation="new", port=endpoint_port(old.target.kv_endpoint))) as new:
            new.expect(("next", 0), prefill.peer, 8)
            prefill.send_all(("next", 0), new.target, 8)
            assert new.end_of(("next", 0)).outcome is ReceptionOutcome.ARRIVED
            assert prefill.end_of(("next", 0)).outcome is TransferOutcome.DONE
            assert prefill.end_of(("open at the crash", 0)).outcome is TransferOutcome.FAILED


def test_a_decode_worker_that_forgot_us_ends_our_open_transfers():
    """It was restarted on the same port: our offer, repeated, reaches somebody who does not know this link."""
    with running(PrefillSide(keepalive=0.1)) as prefill:
        with running(DecodeSide(generation="old")) as old:
            prefill.open(KEY, old.target, 8)
            wait_until(lambda: old.receiver._machine._peers)
        with running(DecodeSide(generation="new", port=endpoint_port(old.target.kv_endpoint))):
            assert prefill.end_of(KEY).outcome is TransferOutcome.FAILED


def test_a_restarted_prefill_worker_ends_what_it_had_offered():
    with running(DecodeSide()) as decode:
        old = RawPeer(decode, "prefill-0", "old")
        decode.expect(KEY, old.peer, 4)
        decode.expect(("new", 0), ("prefill-0", "new"), 4)
        decode.expect(("other", 0), ("prefill-1", "g1"), 4)
        old.send(KvOffer(*KEY, 4))
        assert isinstance(old.hear(), KvGrant)
        new = RawPeer(decode, "prefill-0", "new")
        assert decode.end_of(KEY).outcome is ReceptionOutcome.FAILED
        new.send(KvOffer("new", 0, 4))
        assert isinstance(new.hear(), KvGrant)
        assert set(decode.ends) == {KEY}
        for key in (("new", 0), ("other", 0)):
            decode.receiver.close(key, "over")
            assert decode.end_of(key).outcome is ReceptionOutcome.CLOSED
        old.hangs_up()
        new.hangs_up()


def test_silence_beyond_the_lease_ends_a_reception():
    with running(DecodeSide(lease=0.2)) as decode:
        raw = RawPeer(decode)
        decode.expect(KEY, raw.peer, 4)
        decode.expect(("never offered", 0), raw.peer, 4)
        raw.send(KvOffer(*KEY, 4))
        assert isinstance(raw.hear(), KvGrant)
        before = time.monotonic()
        end = decode.end_of(KEY)
        assert (end.outcome, end.reason) == (ReceptionOutcome.FAILED, "nothing heard from the prefill worker for 0.2 s")
        assert 0.1 < time.monotonic() - before < 5.0
        assert raw.hear() == KvRevoke(*KEY, "the lease ran out")
        time.sleep(0.3)
        decode.collect()
        assert set(decode.ends) == {KEY}, "whether an offer comes at all is the engine's to judge"
        decode.receiver.close(("never offered", 0), "overdue")
        assert decode.end_of(("never offered", 0)).outcome is ReceptionOutcome.CLOSED
        raw.hangs_up()


def test_repeated_offers_keep_a_slow_transfer_alive():
    with running(PrefillSide(keepalive=0.1), DecodeSide(lease=0.5)) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 4)
        prefill.open(KEY, decode.target, 4)
        time.sleep(1.2)
        decode.collect()
        assert decode.ends == {}
        prefill.compute(KEY, 4)
        prefill.sender.first_token(KEY, 1)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        prefill.end_of(KEY)


class ForgetfulListener(KvListener):
    """Loses the first grant, credit and done of each transfer."""

    def __init__(self, host, port) -> None:
        super().__init__(host, port)
        self.lost: set = set()

    def send(self, link, message) -> bool:
        kind = type(message)
        if kind in (KvGrant, KvCredit, KvDone) and (kind, message.request_id) not in self.lost:
            self.lost.add((kind, message.request_id))
            return kind is KvGrant  # lost with, and without, being told
        return super().send(link, message)


def test_lost_grants_credits_and_last_words_heal():
    decode = DecodeSide(window=2 * TOKEN_BYTES, listener_type=ForgetfulListener)
    with running(PrefillSide(keepalive=0.1), decode) as (prefill, _):
        for key in (KEY, ("s", 0)):
            decode.expect(key, prefill.peer, 3)
            prefill.send_all(key, decode.target, 3)
        for key in (KEY, ("s", 0)):
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            assert prefill.end_of(key).outcome is TransferOutcome.DONE
        assert len(decode.listener.lost) == 6


def test_a_full_queue_delays_and_loses_nothing():
    """More messages at once than the socket's queue takes, before the other side is even there."""
    probe = KvListener("127.0.0.1", 0)
    port = endpoint_port(probe.endpoint)
    probe.close()
    with running(PrefillSide(keepalive=5.0)) as prefill:
        target = DecodeTarget("decode-0", "g2", probe.endpoint)
        keys = [(f"r{number}", 0) for number in range(300)]
        for key in keys:
            prefill.computed[key] = 0
            prefill.pool.tables[key] = []
            prefill.sender.open(key, target, 4)
        time.sleep(0.1)
        with running(DecodeSide(port=port)) as decode:
            book = decode.receiver._machine._book
            wait_until(lambda: book.num_parked == len(keys), seconds=3.0)
            offered = book._parked[prefill.peer]
            assert offered.keys() == set(keys)
            for key in keys:
                prefill.sender.abort(key, "enough", tell_peer=True)
            for key in keys:
                prefill.end_of(key)
            wait_until(
                lambda: all(
                    offer.abort_reason == "enough" for links in list(offered.values()) for offer in links.values()
                )
            )


def test_an_idle_link_is_hung_up_and_dialled_again_when_needed():
    with running(PrefillSide(keepalive=0.03), DecodeSide()) as (prefill, decode):
        for turn in range(2):
            key = (f"r{turn}", 0)
            decode.expect(key, prefill.peer, 4)
            prefill.send_all(key, decode.target, 4)
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            prefill.end_of(key)
            wait_until(lambda: not prefill.sender._machine._peers)


def test_a_link_that_fell_silent_is_forgotten_and_a_busy_one_is_not(monkeypatch):
    monkeypatch.setattr(machine_module, "IDLE_LEASES", 1)
    with running(PrefillSide(keepalive=0.05), DecodeSide(lease=0.4)) as (prefill, decode):
        silent = RawPeer(decode)
        decode.expect(KEY, prefill.peer, 4)
        prefill.open(KEY, decode.target, 4)
        wait_until(lambda: len(decode.receiver._machine._peers) == 2)
        wait_until(lambda: len(decode.receiver._machine._peers) == 1)
        time.sleep(0.5)
        prefill.compute(KEY, 4)
        prefill.sender.first_token(KEY, 1)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        prefill.end_of(KEY)
        silent.hangs_up()


def test_a_silent_link_is_kept_while_a_reservation_waits_for_it(monkeypatch):
    monkeypatch.setattr(machine_module, "IDLE_LEASES", 0)
    with running(DecodeSide(lease=0.8)) as decode:
        decode.expect(KEY, ("prefill-7", "g7"), 4)
        raw, idle = RawPeer(decode), RawPeer(decode, "prefill-8")
        wait_until(lambda: len(decode.receiver._machine._peers) == 1)
        raw.send(KvOffer(*KEY, 4))
        assert isinstance(raw.hear(), KvGrant)
        raw.send(KvAbort(*KEY, "enough"))
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ABORTED
        raw.hangs_up()
        idle.hangs_up()


def test_an_offer_that_has_to_make_room_is_revoked(monkeypatch):
    monkeypatch.setattr(incoming_module, "MAX_PARKED_OFFERS", 2)
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        for number in range(4):
            prefill.open((f"r{number}", 0), decode.target, 4)
        for number in range(2):
            end = prefill.end_of((f"r{number}", 0))
            assert (end.outcome, end.reason) == (TransferOutcome.REVOKED, "too many offers wait for a reservation")
        for number in range(2, 4):
            key = (f"r{number}", 0)
            decode.expect(key, prefill.peer, 4)
            prefill.compute(key, 4)
            prefill.sender.first_token(key, 1)
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            prefill.end_of(key)


def test_another_decode_worker_behind_the_same_address_is_not_taken_for_the_one_that_was_meant():
    with running(PrefillSide(), DecodeSide(generation="new")) as (prefill, decode):
        stale = DecodeTarget(decode.target.worker_id, "old", decode.target.kv_endpoint)
        for name in ("a", "b"):
            prefill.open((name, 0), stale, 4)
            end = prefill.end_of((name, 0))
            assert (end.outcome, end.reason) == (TransferOutcome.FAILED, "the decode worker was restarted")
        decode.expect(KEY, prefill.peer, 4)
        prefill.send_all(KEY, decode.target, 4)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        prefill.end_of(KEY)


def test_stopping_in_the_middle_of_transfers_does_not_hang():
    prefill, decode = PrefillSide(), DecodeSide(window=1)
    for number in range(4):
        decode.expect((f"r{number}", 0), prefill.peer, 16)
        prefill.send_all((f"r{number}", 0), decode.target, 16)
    before = time.monotonic()
    prefill.stop()
    decode.stop()
    assert time.monotonic() - before < 3.0
    prefill.events.close()
    decode.events.close()
