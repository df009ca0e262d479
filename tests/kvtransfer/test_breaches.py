"""What a peer that differs, errs or lies costs: its own link, and nobody else anything."""

import logging

import msgspec
import pytest

from kvtransfer import peers as peers_module
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.kv_messages import (
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
)
from kvtransfer.layout import KvBody
from kvtransfer.messages import DecodeTarget, Refused
from kvtransfer.outgoing import TransferOutcome
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide, wait_until
from tests.kvtransfer.raw_peers import KEY, FakeDecode, RawPeer, running, token_frame
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

BODY = KvBody(memoryview(bytes(TOKEN_BYTES)), memoryview(bytes(TOKEN_BYTES)))


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
    assert said_by == {"kvtransfer.targets", "kvtransfer.receive_machine"}


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
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    with running(DecodeSide()) as decode:
        peers = [RawPeer(decode, "prefill-0", f"g{life}") for life in range(4)]
        peers.append(RawPeer(decode, "prefill-1"))
        late = RawPeer(decode, "prefill-2", hello=False)
        late.send(KvHello(PROTOCOL_VERSION, "prefill-2", "g7", FINGERPRINT, LAYOUT))
        assert late.hear() == Refused("2 prefill workers are connected already")
        for peer in (*peers, late):
            peer.hangs_up()


# --- breaches and noise


def frame_before_the_offer(raw):
    raw.send(*token_frame(KEY, 0, 0))


def first_token_before_the_offer(raw):
    raw.send(KvFirstToken(*KEY, 1))


def overlap(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    raw.send(*token_frame(KEY, 0, 0))
    raw.send(*token_frame(KEY, 0, 0))


def answer_to_nothing(raw):
    raw.send(KvOffer(*KEY, 2))
    assert isinstance(raw.hear(), KvGrant)
    header, body = token_frame(KEY, 0, 0)
    raw.send(msgspec.structs.replace(header, resend=1), body)


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
        overlap,
        answer_to_nothing,
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
        wait_until(lambda: decode.receiver._machine._book.get(KEY))
        breach(raw)
        assert raw.hear() == Refused("the link broke the protocol", again=True)
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
        wait_until(lambda: decode.receiver._machine._book.get(KEY))
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
    assert bad.heard == [prefill.hello, KvOffer(*KEY, 4)]
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
