"""Every decoder is total: bytes are a message or a MessageError, at once, and cost no memory worth the name."""

import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.codec import MAX_ERROR_CHARS, encode
from kvtransfer.errors import MessageError
from kvtransfer.kv_messages import decode_from_decode, decode_from_prefill
from kvtransfer.messages import decode_from_gateway, decode_from_worker
from tests.fuzz.hostile import QUICK, TREES, frame_of, spoilt
from tests.kvtransfer.samples import FROM_DECODE, FROM_GATEWAY, FROM_PREFILL, FROM_WORKER

DECODERS = (decode_from_worker, decode_from_gateway, decode_from_prefill, decode_from_decode)
SAMPLES = (*FROM_WORKER, *FROM_GATEWAY, *FROM_PREFILL, *FROM_DECODE)
FRAMES_OF_WORDS = ([*FROM_PREFILL], [*FROM_DECODE])
SPOILT = spoilt(st.sampled_from(SAMPLES))
FRAMES: dict[str, str] = json.loads((Path(__file__).parent / "corpus" / "frames.json").read_text())
"""What each is, to its bytes in hex; `*N` behind a byte repeats it."""


def frame_from(text: str) -> bytes:
    parts = (word.partition("*") for word in text.split())
    return b"".join(bytes.fromhex(byte) * int(times or 1) for byte, _, times in parts)


def read_by_all(frame: bytes) -> int:
    """The number of decoders that take `frame` for a message; what they read is what they would write."""
    num_taken = 0
    for decode in DECODERS:
        found = decode.or_error([frame])
        if isinstance(found, MessageError):
            assert len(str(found)) < 2 * MAX_ERROR_CHARS
            assert str(found).isprintable()
        else:
            assert decode(encode(found)) == found
            num_taken += 1
    return num_taken


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_were_interesting_once(name):
    frame = frame_from(FRAMES[name])
    tracemalloc.start()
    start = time.monotonic()
    num_taken = read_by_all(frame)
    seconds, (_, peak) = time.monotonic() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_taken == 0
    assert peak < 4 << 20, "a few bytes made it take memory"
    assert seconds < 5.0


def test_there_is_a_corpus_of_frames():
    assert len(FRAMES) >= 15


@pytest.mark.parametrize("message", [*SAMPLES, *FRAMES_OF_WORDS], ids=lambda message: type(message).__name__)
def test_samples_are_read_so_that_the_comparison_means_something(message):
    assert read_by_all(encode(message)) >= 1


@QUICK
@given(tree=TREES | SPOILT | st.lists(SPOILT, max_size=3))
def test_trees_of_any_kind(tree):
    read_by_all(frame_of(tree))


@QUICK
@given(message=st.sampled_from((*SAMPLES, *FRAMES_OF_WORDS)), data=st.data())
def test_cut_doubled_and_flipped_frames(message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, max(0, len(frame) - 1)))
        kind = data.draw(st.sampled_from(["cut", "double", "flip", "insert"]))
        if kind == "cut":
            del frame[place : place + data.draw(st.integers(1, 9))]
        elif kind == "double":
            frame[place:place] = frame[place : place + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            frame[place:place] = data.draw(st.binary(min_size=1, max_size=5))
        elif frame:
            frame[place % len(frame)] = data.draw(st.integers(0, 255))
    read_by_all(bytes(frame))
