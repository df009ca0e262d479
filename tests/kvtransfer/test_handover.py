"""Sender and receiver as they run: threads, loopback sockets, small windows, and everything that goes wrong."""

import logging
import random
import time
from contextlib import contextmanager

import msgspec
import pytest

from kvtransfer import receiver as receiver_module
from kvtransfer.channel import KvBody, KvDialer, KvListener, endpoint_port
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.messages import (
    PROTOCOL_VERSION,
    DecodeTarget,
    KvAbort,
    KvCredit,
    KvDone,
    KvFirstToken,
    KvGrant,
    KvHeader,
    KvHello,
    KvOffer,
    KvRevoke,
    KvWelcome,
    Refused,
)
from kvtransfer.outgoing import TransferOutcome
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide, content, wait_until
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

KEY = ("r", 0)
BODY = KvBody(memoryview(bytes(TOKEN_BYTES)), memoryview(bytes(TOKEN_BYTES)))


@contextmanager
def running(*sides):
    """Stops the sides at the end, well or not, and then everything must be empty."""
    try:
        yield sides[0] if len(sides) == 1 else sides
        for side in sides:
            assert (side.sender if isinstance(side, PrefillSide) else side.receiver).is_alive()
    finally:
        for side in sides:
            side.stop()
    for side in sides:
        side.check_at_rest()
        assert len((side.sender if isinstance(side, PrefillSide) else side.receiver)._book) == 0
        side.events.close()


def token_frame(key, layer, token) -> tuple[KvHeader, KvBody]:
    header = KvHeader(*key, layer, token, token + 1, 0, LAYOUT.num_kv_heads, LAYOUT.dtype)
    return header, KvBody(*(memoryview(content(key, layer, part, token)) for part in (0, 1)))


class RawPeer:
    """A prefill worker of the test's own making: speaks whatever it likes."""

    def __init__(self, decode: DecodeSide, name="prefill-7", generation="g7", link=None, hello=True) -> None:
        self.peer = (name, generation)
        self._dialer = KvDialer(link or f"{name}/{generation}")
        self._dialer.dial("d", decode.target.kv_endpoint)
        if hello:
            self.send(KvHello(PROTOCOL_VERSION, name, generation, FINGERPRINT, LAYOUT))
            assert self.hear() == KvWelcome(decode.target.generation)

    def send(self, message, body=None) -> None:
        assert self._dialer.send("d", message, body)

    def hear(self):
        heard: list = []

        def has_come() -> bool:
            self._dialer.poll(0.05)
            heard.extend(self._dialer.receive())
            return bool(heard)

        wait_until(has_come)
        assert len(heard) == 1, heard
        return heard[0][1]

    def hangs_up(self) -> None:
        self._dialer.close()


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
        wait_until(lambda: decode.receiver._book._parked)
        decode.expect(KEY, prefill.peer, 8)
        end = decode.end_of(KEY, seconds=3.0)
        assert (end.outcome, end.reason) == (ReceptionOutcome.ABORTED, "out of luck")


def test_a_close_reaches_the_other_side():
    with running(PrefillSide(), DecodeSide(window=1)) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 16)
        prefill.open(KEY, decode.target, 16)
        prefill.compute(KEY, 16)
        wait_until(lambda: decode.receiver._first_frame_at)
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


# --- identities


DIFFERENT = {
    "model weights: w0 != w9": {"fingerprint": msgspec.structs.replace(FINGERPRINT, weights="w9")},
    "KV head_dim: 4 != 8": {"layout": msgspec.structs.replace(LAYOUT, head_dim=8)},
    f"protocol version: {PROTOCOL_VERSION} != 99": {"protocol": 99},
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_peer_that_differs_is_refused_with_the_difference_on_both_sides(difference, caplog):
    with running(PrefillSide(**DIFFERENT[difference]), DecodeSide()) as (prefill, decode):
        prefill.open(KEY, decode.target, 4)
        end = prefill.end_of(KEY)
        assert (end.outcome, end.reason) == (TransferOutcome.FAILED, difference)
        prefill.open(("next", 0), decode.target, 4)
        assert prefill.end_of(("next", 0)).reason == difference
    said_by = {record.name for record in caplog.records if difference in record.getMessage()}
    assert said_by == {"kvtransfer.sender", "kvtransfer.receiver"}


def test_a_difference_too_long_to_say_is_cut_and_still_understood():
    huge = msgspec.structs.replace(FINGERPRINT, config="x" * 2048, weights="y" * 2048)
    with running(PrefillSide(fingerprint=huge), DecodeSide()) as (prefill, decode):
        prefill.open(KEY, decode.target, 4)
        assert prefill.end_of(KEY).reason.startswith("model config: c0 != xxx")


def test_only_the_block_size_may_differ():
    with running(PrefillSide(layout=msgspec.structs.replace(LAYOUT, block_size=99)), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 4)
        prefill.send_all(KEY, decode.target, 4)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        prefill.end_of(KEY)


def test_peers_are_bounded_and_a_restarted_one_takes_its_own_place(monkeypatch):
    monkeypatch.setattr(receiver_module, "MAX_PEERS", 2)
    with running(DecodeSide()) as decode:
        peers = [RawPeer(decode, "prefill-0", f"g{life}") for life in range(4)]
        peers.append(RawPeer(decode, "prefill-1"))
        late = RawPeer(decode, "prefill-2", hello=False)
        late.send(KvHello(PROTOCOL_VERSION, "prefill-2", "g1", FINGERPRINT, LAYOUT))
        assert late.hear() == Refused("2 prefill workers are connected already")
        for peer in (*peers, late):
            peer.hangs_up()


# --- breaches and noise


def frame_before_the_offer(raw):
    raw.send(*token_frame(KEY, 0, 0))


def first_token_before_the_offer(raw):
    raw.send(KvFirstToken(*KEY, 1))


def first_token_before_the_kv(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    raw.send(KvFirstToken(*KEY, 1))


def gap(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    raw.send(*token_frame(KEY, 0, 1))


def layer_out_of_range(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    raw.send(*token_frame(KEY, LAYOUT.num_layers, 0))


def part_of_the_heads(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    half = memoryview(bytes(TOKEN_BYTES // 2))
    raw.send(KvHeader(*KEY, 0, 0, 1, 0, 1, LAYOUT.dtype), KvBody(half, half))


def short_body(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    raw.send(token_frame(KEY, 0, 0)[0], KvBody(BODY.k[:-1], BODY.v))


def header_without_bodies(raw):
    raw.send(token_frame(KEY, 0, 0)[0])


def bodies_without_a_header(raw):
    raw.send(KvOffer(*KEY, 2), BODY)


def noise(raw):
    raw.send(GarbageMessage())


class GarbageMessage(msgspec.Struct, tag_field="type", tag="Nonsense"):
    pass


@pytest.mark.parametrize(
    "breach",
    [
        frame_before_the_offer,
        first_token_before_the_offer,
        first_token_before_the_kv,
        gap,
        layer_out_of_range,
        part_of_the_heads,
        short_body,
        header_without_bodies,
        bodies_without_a_header,
        noise,
    ],
)
def test_a_breach_costs_its_sender_the_link_and_nobody_else_anything(breach):
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        other = ("other", 0)
        decode.expect(other, prefill.peer, 6)
        prefill.open(other, decode.target, 6)
        prefill.compute(other, 3)
        raw = RawPeer(decode)
        decode.expect(KEY, raw.peer, 2)
        wait_until(lambda: decode.receiver._book.get(KEY))
        breach(raw)
        assert raw.hear() == Refused("the link broke the protocol")
        end = decode.end_of(KEY)
        assert (end.outcome, end.reason) == (ReceptionOutcome.FAILED, "the prefill worker broke the protocol")
        raw.hangs_up()
        prefill.compute(other, 6)
        prefill.sender.first_token(other, 5)
        assert decode.end_of(other).outcome is ReceptionOutcome.ARRIVED
        assert prefill.end_of(other).outcome is TransferOutcome.DONE


def test_a_first_token_outside_the_vocabulary_is_a_breach():
    with running(DecodeSide()) as decode:
        raw = RawPeer(decode)
        decode.expect(KEY, raw.peer, 1, first_token=1)
        raw.send(KvOffer(*KEY, 1))
        assert isinstance(raw.hear(), KvGrant)
        raw.send(KvFirstToken(*KEY, FINGERPRINT.vocab_size))
        assert isinstance(raw.hear(), Refused)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.FAILED
        raw.hangs_up()


def test_strangers_are_refused_counted_and_not_logged(caplog):
    with running(DecodeSide()) as decode:
        raw = RawPeer(decode, hello=False)
        for _ in range(50):
            raw.send(KvOffer(*KEY, 2))
        wait_until(lambda: decode.receiver.num_dropped == 50)
        raw.hangs_up()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_stranger_cannot_fill_or_end_another_peers_transfer():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        raw = RawPeer(decode)
        raw.send(KvOffer(*KEY, 2))
        decode.expect(KEY, prefill.peer, 2)
        wait_until(lambda: decode.receiver._book.get(KEY))
        raw.send(KvOffer(*KEY, 2))
        raw.send(*token_frame(KEY, 0, 0))
        raw.send(KvAbort(*KEY, "mine"))
        wait_until(lambda: decode.receiver.num_dropped == 1)
        prefill.send_all(KEY, decode.target, 2)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        assert prefill.end_of(KEY).outcome is TransferOutcome.DONE
        raw.hangs_up()


def test_after_a_breach_of_our_own_the_next_transfer_dials_anew():
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 4)
        right, prefill.pool.gather = prefill.pool.gather, lambda key, piece: BODY
        prefill.send_all(KEY, decode.target, 4)
        assert prefill.end_of(KEY).outcome is TransferOutcome.FAILED
        assert decode.end_of(KEY).outcome is ReceptionOutcome.FAILED
        prefill.pool.gather = right
        decode.expect(("next", 0), prefill.peer, 4)
        prefill.send_all(("next", 0), decode.target, 4)
        assert decode.end_of(("next", 0)).outcome is ReceptionOutcome.ARRIVED
        assert prefill.end_of(("next", 0)).outcome is TransferOutcome.DONE


class FakeDecode:
    """A decode worker of the test's own making."""

    def __init__(self) -> None:
        self.listener = KvListener("127.0.0.1", 0)
        self.target = DecodeTarget("decode-9", "g9", self.listener.endpoint)
        self.heard: list = []
        self.link = b""

    def answer(self, *messages) -> None:
        """Waits for an offer, then says `messages`."""

        def has_come() -> bool:
            self.listener.poll(0.05)
            if received := self.listener.receive():
                self.link, message, _ = received
                self.heard.append(message)
            return any(isinstance(message, KvOffer) for message in self.heard)

        wait_until(has_come)
        for message in messages:
            assert self.listener.send(self.link, message)


@pytest.mark.parametrize(
    "breach",
    [[KvGrant(*KEY, 5, 10)], [KvGrant(*KEY, 0, 10), KvCredit(*KEY, 1 << 40)], [GarbageMessage()]],
    ids=["grant-beyond", "credit-ahead", "noise"],
)
def test_a_decode_worker_that_breaks_the_protocol_costs_others_nothing(breach):
    bad = FakeDecode()
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        prefill.open(KEY, bad.target, 4)
        bad.answer(KvWelcome("g9"), *breach)
        end = prefill.end_of(KEY)
        assert (end.outcome, end.reason) == (TransferOutcome.FAILED, "the decode worker broke the protocol")
        decode.expect(("other", 0), prefill.peer, 4)
        prefill.send_all(("other", 0), decode.target, 4)
        assert decode.end_of(("other", 0)).outcome is ReceptionOutcome.ARRIVED
        prefill.end_of(("other", 0))
    assert bad.heard == [prefill.sender.hello, KvOffer(*KEY, 4)]
    bad.listener.close()


def test_words_about_another_workers_transfer_are_not_heard():
    bad = FakeDecode()
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        decode.expect(KEY, prefill.peer, 4)
        prefill.open(KEY, decode.target, 4)
        prefill.open(("bait", 0), bad.target, 4)
        bad.answer(KvWelcome("g9"), KvDone(*KEY), KvRevoke(*KEY, "mine"), KvGrant(*KEY, 3, 10), KvDone("bait", 0))
        assert prefill.end_of(("bait", 0)).outcome is TransferOutcome.DONE
        prefill.compute(KEY, 4)
        prefill.sender.first_token(KEY, 1)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        assert prefill.end_of(KEY).outcome is TransferOutcome.DONE
    bad.listener.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1:99999", "tcp://*:1"])
def test_a_target_that_cannot_be_dialled_fails_its_transfer_only(endpoint):
    with running(PrefillSide(), DecodeSide()) as (prefill, decode):
        prefill.open(KEY, DecodeTarget("decode-8", "g8", endpoint), 4)
        end = prefill.end_of(KEY)
        assert (end.outcome, end.reason) == (
            TransferOutcome.FAILED,
            "the decode worker's KV address cannot be dialled",
        )
        decode.expect(("next", 0), prefill.peer, 4)
        prefill.send_all(("next", 0), decode.target, 4)
        assert decode.end_of(("next", 0)).outcome is ReceptionOutcome.ARRIVED
        prefill.end_of(("next", 0))


# --- restarts, silence, losses


def test_a_restarted_decode_worker_is_dialled_anew():
    with running(PrefillSide(keepalive=0.1)) as prefill:
        old = DecodeSide(generation="old")
        with running(old):
            old.expect(KEY, prefill.peer, 8)
            prefill.open(KEY, old.target, 8)
            prefill.compute(KEY, 4)
            wait_until(lambda: old.receiver._first_frame_at)
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
            wait_until(lambda: old.receiver._peers)
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
        for key in (KEY, ("never offered", 0)):
            end = decode.end_of(key)
            assert (end.outcome, end.reason) == (
                ReceptionOutcome.FAILED,
                "nothing heard from the prefill worker for 0.2 s",
            )
        assert 0.1 < time.monotonic() - before < 5.0
        assert raw.hear() == KvRevoke(*KEY, "the lease ran out")
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
            offered = decode.receiver._book._parked
            wait_until(lambda: {name for name, _ in list(offered)} == set(keys), seconds=3.0)
            for key in keys:
                prefill.sender.abort(key, "enough", tell_peer=True)
            for key in keys:
                prefill.end_of(key)
            wait_until(lambda: all(offer.abort_reason == "enough" for offer in list(offered.values())))


def test_an_idle_link_is_hung_up_and_dialled_again_when_needed():
    with running(PrefillSide(keepalive=0.03), DecodeSide()) as (prefill, decode):
        for turn in range(2):
            key = (f"r{turn}", 0)
            decode.expect(key, prefill.peer, 4)
            prefill.send_all(key, decode.target, 4)
            assert decode.end_of(key).outcome is ReceptionOutcome.ARRIVED
            prefill.end_of(key)
            wait_until(lambda: not prefill.sender._peers)


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
