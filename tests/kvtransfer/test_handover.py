"""Sender and receiver as they run: threads, loopback sockets, small windows, and ends that either side wants."""

import random
import threading
import time

import pytest

from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_messages import KvAbort, KvCredit, KvDone, KvFirstToken, KvGrant, KvOffer, KvRevoke
from kvtransfer.outgoing import TransferOutcome
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide, wait_until
from tests.kvtransfer.raw_peers import KEY, RawPeer, running, token_frame

# --- when all goes well


@pytest.mark.parametrize("window", [1, 3 * TOKEN_BYTES, 10 * TOKEN_BYTES, 1 << 20])
@pytest.mark.parametrize(("prefill_block", "decode_block"), [(4, 16), (16, 4)])
def test_many_transfers_at_once_arrive_whole(window, prefill_block, decode_block):
    dice = random.Random(window)
    with running(PrefillSide(prefill_block), DecodeSide(decode_block, window)) as (prefill, decode):
        lengths = {(f"r{number}", number % 3): dice.randint(1, 16) for number in range(8)}
        for key, num_tokens in lengths.items():
            if dice.random() < 0.5:
                decode.expect(key, prefill.peer, num_tokens)
                prefill.open(key, decode.target, num_tokens)
            else:
                prefill.open(key, decode.target, num_tokens)
                decode.expect(key, prefill.peer, num_tokens)
        while pending := [key for key, total in lengths.items() if prefill.computed[key] < total]:
            key = dice.choice(pending)
            prefill.compute(key, dice.randint(prefill.computed[key] + 1, lengths[key]))
            if prefill.computed[key] == lengths[key]:
                prefill.sender.first_token(key, len(key[0]) + lengths[key])
        for key, num_tokens in lengths.items():
            end = decode.end_of(key)
            assert (end.outcome, end.first_token_id) == (ReceptionOutcome.ARRIVED, len(key[0]) + num_tokens)
            assert end.first_frame_at is not None
            assert prefill.end_of(key).outcome is TransferOutcome.DONE


@pytest.mark.parametrize("first_token", [0, 5, 12])
def test_only_what_is_missing_is_sent(first_token):
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 12, first_token)
        prefill.send_all(KEY, decode.target, 12)
        end = decode.end_of(KEY)
        assert (end.outcome, end.first_token_id) == (ReceptionOutcome.ARRIVED, 7)
        assert (end.first_frame_at is None) == (first_token == 12)
        assert prefill.end_of(KEY).outcome is TransferOutcome.DONE


def test_attempts_of_one_request_are_strangers_to_each_other():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        for attempt in (0, 1):
            decode.expect(("r", attempt), prefill.peer, 4)
            prefill.send_all(("r", attempt), decode.target, 4, first_token=attempt)
        for attempt in (0, 1):
            assert decode.end_of(("r", attempt)).first_token_id == attempt
            prefill.end_of(("r", attempt))


def test_a_window_never_has_more_than_its_bytes_on_the_way():
    with running(DecodeSide(window=4 * TOKEN_BYTES)) as decode:
        raw = RawPeer(decode)
        decode.expect(KEY, raw.peer, 4)
        raw.send(KvOffer(*KEY, 4))
        assert raw.hear() == KvGrant(*KEY, 0, 4 * TOKEN_BYTES)
        raw.send(*token_frame(KEY, 0, 0))
        assert raw.hear() == KvCredit(*KEY, 2 * TOKEN_BYTES)
        raw.send(KvAbort(*KEY, "enough"))
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ABORTED
        raw.hangs_up()


# --- ends that one side wants


def test_an_abort_reaches_the_other_side():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 8)
        prefill.open(KEY, decode.target, 8)
        prefill.compute(KEY, 4)
        prefill.sender.abort(KEY, "out of luck", tell_peer=True)
        assert prefill.end_of(KEY).outcome is TransferOutcome.ABORTED
        end = decode.end_of(KEY)
        assert (end.outcome, end.reason) == (ReceptionOutcome.ABORTED, "out of luck")


def test_an_abort_that_overtakes_the_reservation_is_remembered_for_it():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        prefill.open(KEY, decode.target, 8)
        prefill.sender.abort(KEY, "out of luck", tell_peer=True)
        assert prefill.end_of(KEY).outcome is TransferOutcome.ABORTED
        wait_until(lambda: decode.receiver._machine._book._parked)
        decode.expect(KEY, prefill.peer, 8)
        end = decode.end_of(KEY, seconds=3.0)
        assert (end.outcome, end.reason) == (ReceptionOutcome.ABORTED, "out of luck")


def test_a_close_reaches_the_other_side():
    with running(PrefillSide(), DecodeSide(window=1)) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 16)
        prefill.open(KEY, decode.target, 16)
        prefill.compute(KEY, 16)
        wait_until(lambda: decode.receiver._machine._ends._first_frame_at)
        decode.receiver.close(KEY, "nobody waits")
        assert decode.end_of(KEY).outcome is ReceptionOutcome.CLOSED
        end = prefill.end_of(KEY)
        assert (end.outcome, end.reason) == (TransferOutcome.REVOKED, "nobody waits")


def test_an_offer_for_what_is_closed_already_is_revoked():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 4)
        decode.receiver.close(KEY, "nobody waits")
        assert decode.end_of(KEY).outcome is ReceptionOutcome.CLOSED
        prefill.send_all(KEY, decode.target, 4)
        assert prefill.end_of(KEY).outcome is TransferOutcome.REVOKED


def test_late_frames_are_dropped_and_counted_and_land_nowhere():
    with running(DecodeSide()) as decode:
        raw = RawPeer(decode)
        decode.expect(KEY, raw.peer, 4)
        raw.send(KvOffer(*KEY, 4))
        assert isinstance(raw.hear(), KvGrant)
        decode.receiver.close(KEY, "gone")
        assert isinstance(raw.hear(), KvRevoke)
        decode.end_of(KEY)
        for token in range(3):
            raw.send(*token_frame(KEY, 0, token))
        raw.send(KvFirstToken(*KEY, 1))
        wait_until(lambda: decode.receiver.num_dropped == 4)
        raw.hangs_up()


def test_a_lost_word_that_all_arrived_is_said_again():
    with running(DecodeSide()) as decode:
        raw = RawPeer(decode)
        decode.expect(KEY, raw.peer, 1, first_token=1)
        raw.send(KvOffer(*KEY, 1))
        assert isinstance(raw.hear(), KvGrant)
        raw.send(KvFirstToken(*KEY, 1))
        assert raw.hear() == KvDone(*KEY)
        raw.send(KvOffer(*KEY, 1))
        assert raw.hear() == KvDone(*KEY)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        raw.hangs_up()


def test_sides_that_disagree_about_the_length_both_end():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 5)
        prefill.send_all(KEY, decode.target, 4)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.FAILED
        assert prefill.end_of(KEY).reason == decode.end_of(KEY).reason == "4 tokens offered, 5 expected"


@pytest.mark.parametrize("seed", range(3))
def test_cancels_at_random_moments_on_either_side_leave_nothing_behind(seed):
    dice = random.Random(seed)
    with running(PrefillSide(), DecodeSide(window=4 * TOKEN_BYTES)) as (prefill, decode):
        opened, cancelled = [], set()
        for number in range(60):
            key, num_tokens = (f"r{number}", 0), dice.randint(1, 12)
            if prefill.pool.books.can_fit(num_tokens) and decode.pool.books.can_fit(num_tokens):
                decode.expect(key, prefill.peer, num_tokens)
                prefill.open(key, decode.target, num_tokens)
                opened.append((key, num_tokens))
            for key, num_tokens in dice.sample(opened, min(4, len(opened))):
                if key not in prefill.ends and key not in cancelled and prefill.computed[key] < num_tokens:
                    prefill.compute(key, dice.randint(prefill.computed[key] + 1, num_tokens))
                    if prefill.computed[key] == num_tokens:
                        prefill.sender.first_token(key, 3)
            if dice.random() < 0.4:
                cancelled.add(cancel(dice, prefill, decode, dice.choice(opened)[0]))
            time.sleep(dice.choice([0, 0.0005]))
            prefill.collect()
            decode.collect()
        for key, num_tokens in opened:
            if key not in prefill.ends and key not in cancelled and prefill.computed[key] < num_tokens:
                prefill.compute(key, num_tokens)
                prefill.sender.first_token(key, 3)
        for key, _ in opened:
            prefill.end_of(key)
            decode.end_of(key)
        untouched = {key for key, _ in opened} - cancelled
        assert {decode.ends[key].outcome for key in untouched} == {ReceptionOutcome.ARRIVED}
        assert {prefill.ends[key].outcome for key in untouched} == {TransferOutcome.DONE}
        assert any(decode.ends[key].outcome is not ReceptionOutcome.ARRIVED for key in cancelled)


def cancel(dice, prefill, decode, key):
    """As the schedulers do it: either side, or both when the gateway cancels."""
    how = dice.choice(["prefill fails", "decode", "gateway"])
    if how == "prefill fails":
        prefill.sender.abort(key, how, tell_peer=True)
    if how == "gateway":
        prefill.sender.abort(key, how, tell_peer=False)
    if how in ("decode", "gateway"):
        decode.receiver.close(key, how)
    return key


def test_what_the_sender_is_told_has_not_happened_before_it_was_said():
    """The engine's clock readings and the sender's make one account of a request, which must not go backwards."""
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        commands = prefill.sender._commands
        drain, is_draining = commands.drain, threading.Event()

        def late_drain():
            is_draining.set()
            time.sleep(0.02)
            return drain()

        commands.drain = late_drain
        decode.expect(KEY, prefill.peer, 4)
        prefill.open(KEY, decode.target, 4)
        is_draining.wait()  # the sender is between its wake-up and what it was woken for
        said_at = time.monotonic()
        prefill.compute(KEY, 4)
        prefill.sender.first_token(KEY, 7)
        assert prefill.end_of(KEY).times.ready_at >= said_at
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
