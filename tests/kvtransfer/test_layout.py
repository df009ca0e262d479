"""Who may exchange KV, and how token ranges become frames."""

import msgspec
import pytest

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.errors import ProtocolError
from kvtransfer.kv_messages import MAX_BODY_BYTES, KvHeader
from kvtransfer.layout import FP8, check_header, describe_mismatch, head_bytes, max_frame_tokens, our_identity
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

OURS = our_identity(FINGERPRINT, LAYOUT)


def header(**changes) -> KvHeader:
    fields = {"layer": 1, "start": 2, "stop": 5, "head_start": 0, "head_stop": 2, "dtype": "float32"}
    return KvHeader("r", 0, **(fields | changes))


def test_equal_identities_match_whatever_their_block_sizes():
    assert describe_mismatch(OURS, OURS) is None
    other = our_identity(FINGERPRINT, msgspec.structs.replace(LAYOUT, block_size=64))
    assert describe_mismatch(OURS, other) is None


@pytest.mark.parametrize("field", FINGERPRINT.__struct_fields__)
def test_any_difference_of_the_model_is_named(field):
    value = 7 if field == "vocab_size" else "another"
    theirs = our_identity(msgspec.structs.replace(FINGERPRINT, **{field: value}), LAYOUT)
    assert describe_mismatch(OURS, theirs) == f"model {field}: {getattr(FINGERPRINT, field)} != {value}"


@pytest.mark.parametrize("field", [name for name in LAYOUT.__struct_fields__ if name != "block_size"])
def test_any_difference_of_the_layout_is_named(field):
    value = "bfloat16" if field == "dtype" else 99
    theirs = our_identity(FINGERPRINT, msgspec.structs.replace(LAYOUT, **{field: value}))
    assert describe_mismatch(OURS, theirs) == f"KV {field}: {getattr(LAYOUT, field)} != {value}"


def test_a_float8_pool_has_no_peer_of_another_format():
    float8 = msgspec.structs.replace(LAYOUT, dtype="float8_e4m3fn")
    theirs = our_identity(FINGERPRINT, float8)
    assert describe_mismatch(OURS, theirs) == "KV dtype: float32 != float8_e4m3fn"
    assert describe_mismatch(theirs, theirs) is None
    assert head_bytes(float8, float8.dtype) == head_bytes(LAYOUT, LAYOUT.dtype) // 4


def test_all_differences_are_named_together():
    theirs = (PROTOCOL_VERSION + 1, msgspec.structs.replace(FINGERPRINT, weights="w1"), LAYOUT)
    assert describe_mismatch(OURS, theirs) == (
        f"protocol version: {PROTOCOL_VERSION} != {PROTOCOL_VERSION + 1}; model weights: w0 != w1"
    )


def test_frame_arithmetic():
    assert head_bytes(LAYOUT, "float32") == 4 * 4
    assert head_bytes(LAYOUT, FP8) == 4 * 1 + 4
    assert max_frame_tokens(32, 100) == 3
    assert max_frame_tokens(32) * 32 <= MAX_BODY_BYTES
    with pytest.raises(ProtocolError, match="one token takes 32 bytes"):
        max_frame_tokens(32, 31)


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        ({}, 96),
        ({"head_start": 1}, 48),
        ({"layer": 0, "start": 0, "stop": 1}, 32),
        ({"layer": 0, "num_layers": 2}, 192),
        ({"layer": 0, "num_layers": 2, "dtype": FP8}, 96),
        ({"dtype": FP8}, 48),
        ({"dtype": FP8, "head_start": 1}, 24),
    ],
)
def test_headers_within_the_layout_pass(changes, num_bytes):
    check_header(header(**changes), num_bytes, num_bytes, LAYOUT)


@pytest.mark.parametrize(
    ("changes", "k_bytes", "v_bytes", "says"),
    [
        ({"layer": 2}, 96, 96, "layer 2 of 2"),
        ({"num_layers": 2}, 192, 192, "layer 2 of 2"),
        ({"num_layers": 1 << 53}, 96, 96, "of 2"),
        ({"layer": 0, "num_layers": 2}, 96, 96, "header makes it 192"),
        ({"layer": 0, "num_layers": 2, "stop": 20000}, 2 * 19998 * 32, 2 * 19998 * 32, "header makes it"),
        ({"dtype": "float16"}, 96, 96, "dtype float16"),
        ({"dtype": FP8}, 96, 96, "header makes it 48"),
        ({"stop": 2}, 0, 0, "empty token range"),
        ({"start": 9}, 96, 96, "empty token range"),
        ({"head_stop": 3}, 144, 144, "KV heads"),
        ({"head_start": 2}, 0, 0, "KV heads"),
        ({}, 96, 95, "96 and 95 bytes"),
        ({}, 97, 97, "97 and 97 bytes"),
        ({}, 0, 0, "0 and 0 bytes"),
        ({"start": 0, "stop": 1 << 50}, 96, 96, "96 and 96 bytes"),
        ({"start": 0, "stop": 32769}, 32769 * 32, 32769 * 32, "header makes it"),
    ],
)
def test_headers_outside_the_layout_are_refused(changes, k_bytes, v_bytes, says):
    with pytest.raises(ProtocolError, match=says):
        check_header(header(**changes), k_bytes, v_bytes, LAYOUT)
