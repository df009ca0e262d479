"""Noise damages what a checksum covers, always so that the checksum notices, and nothing but KV frames."""

import random

import pytest

from kvtransfer.checksum import is_intact
from kvtransfer.codec import PROTOCOL_VERSION, encode
from kvtransfer.frames import FrameMaker, FrameOptions
from kvtransfer.kv_messages import KvHello, KvOffer, decode_from_prefill
from kvtransfer.layout import KvBody
from kvtransfer.outgoing import OutgoingTransfer, Piece
from tests.simulation.engine import FINGERPRINT, layout_of
from tests.simulation.noise import Noise

NUM_FRAMES = 400


def frame() -> list[bytes]:
    """As it goes over the wire: 3 tokens of a layer in the middle, asked for again before."""
    hello = KvHello(PROTOCOL_VERSION, "prefill-0", "g1", FINGERPRINT, layout_of(3, 4))
    transfer = OutgoingTransfer(("r", 0), num_tokens=9, num_layers=3, piece_bytes_per_token=16, max_piece_tokens=4)
    k, v = bytes(range(24)), bytes(range(24, 48))
    header = FrameMaker(hello, FrameOptions(with_checksum=True)).header(transfer, Piece(1, 2, 5), KvBody(k, v))
    return [encode(header), k, v]


def is_sound(frames: list[bytes]) -> bool:
    return is_intact(decode_from_prefill(frames[0]), KvBody(frames[1], frames[2]))


def test_what_is_damaged_is_another_frame_and_the_checksum_tells():
    noise, sent = Noise(random.Random(1), damage=1.0, loss=0.0), frame()
    assert is_sound(sent)
    arrived = [noise(list(sent)) for _ in range(NUM_FRAMES)]
    changed = [frames for frames in arrived if frames != sent]
    assert len(changed) == noise.num_damaged > NUM_FRAMES / 2
    assert not any(is_sound(frames) for frames in changed)
    assert all(any(frames[part] != sent[part] for frames in changed) for part in range(3)), "header, K and V"


@pytest.mark.parametrize("loss", [0.0, 0.25, 1.0])
def test_what_is_lost_is_counted(loss):
    noise, sent = Noise(random.Random(2), damage=0.0, loss=loss), frame()
    arrived = [noise(list(sent)) for _ in range(NUM_FRAMES)]
    assert arrived.count(None) == noise.num_lost == pytest.approx(loss * NUM_FRAMES, rel=0.2)
    assert all(frames == sent for frames in arrived if frames is not None)


def test_words_go_as_they_were_sent():
    noise, word = Noise(random.Random(3), damage=1.0, loss=1.0), [encode(KvOffer("r", 0, num_tokens=3))]
    assert noise(word) is word
    assert noise.num_damaged == noise.num_lost == 0
