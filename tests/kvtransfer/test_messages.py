"""The protocol file: what is encoded comes back, and whatever else arrives is a MessageError and nothing else."""

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.codec import MAX_CONTROL_BYTES, MAX_ERROR_CHARS, encode
from kvtransfer.errors import MessageError
from kvtransfer.kv_messages import decode_from_decode, decode_from_prefill
from kvtransfer.messages import StepOutput, decode_from_gateway, decode_from_worker
from kvtransfer.request_parts import MAX_GRAMMAR_CHARS, MAX_PROMPT_TOKENS, EndReason
from tests.kvtransfer.samples import FROM_DECODE, FROM_GATEWAY, FROM_PREFILL, FROM_WORKER

DIRECTIONS = {
    decode_from_worker: FROM_WORKER,
    decode_from_gateway: FROM_GATEWAY,
    decode_from_prefill: FROM_PREFILL,
    decode_from_decode: FROM_DECODE,
}
CASES = [(decode, message) for decode, messages in DIRECTIONS.items() for message in messages]
HAVE_DEFAULTS = {
    ("Hello", "introduction"),
    ("Hello", "shares_prefixes"),
    ("Hello", "can_switch"),
    ("Hello", "eos_token_ids"),
    ("Heartbeat", "draining"),
    ("Goodbye", "cause"),
    *((kind, name) for kind in ("PrefillRequest", "DecodeRequest") for name in ("sequence", "siblings")),
    ("Cancel", "sequence"),
    ("ResetPrefixCache", "sequence"),
    ("SwitchRole", "timeout_s"),
    ("SwitchRole", "sequence"),
    ("Refused", "again"),
    ("KvHello", "head_start"),
    ("KvHello", "head_stop"),
    ("KvWelcome", "wire_dtypes"),
    *((kind, name) for kind in ("KvOffer", "KvFirstToken") for name in ("sent_bytes", "num_resends")),
    *(("KvFirstToken", name) for name in ("logprob", "siblings")),
    *(("KvHeader", name) for name in ("sent_bytes", "resend", "checksum", "num_layers")),
}
HEARTBEAT = FROM_WORKER[2]
PREFILL_REQUEST = FROM_GATEWAY[4]


def tree(message):
    """A message as plain maps and lists, to be spoilt."""
    return msgspec.msgpack.decode(encode(message))


def pack(value) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(("decode", "message"), CASES)
def test_what_is_encoded_comes_back(decode, message):
    frame = encode(message)
    assert decode(frame) == message
    assert type(decode(memoryview(frame))) is type(message)


def test_there_is_a_sample_of_every_message():
    assert {type(message).__name__ for _, message in CASES} == {
        *("Hello", "Heartbeat", "StepOutput", "Goodbye"),
        *("Welcome", "Refused", "Reintroduce", "GatewayBeat", "PrefillRequest", "DecodeRequest", "Cancel"),
        *("ResetPrefixCache", "SwitchRole"),
        *("KvHello", "KvOffer", "KvHeader", "KvFirstToken", "KvAbort"),
        *("KvWelcome", "KvGrant", "KvCredit", "KvResend", "KvDone", "KvRevoke"),
    }


@pytest.mark.parametrize(("decode", "message"), CASES)
def test_a_message_in_the_wrong_direction_is_refused(decode, message):
    for other, messages in DIRECTIONS.items():
        if type(message) not in {type(known) for known in messages}:
            with pytest.raises(MessageError):
                other(encode(message))


@pytest.mark.parametrize(("decode", "message"), CASES)
def test_every_truncation_is_refused(decode, message):
    frame = encode(message)
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            decode(frame[:length])
    with pytest.raises(MessageError):
        decode(frame + b"\xc0")


@pytest.mark.parametrize(("decode", "message"), CASES)
def test_each_missing_or_unknown_field_is_refused(decode, message):
    with pytest.raises(MessageError):
        decode(pack(tree(message) | {"surprise": 1}))
    for name in type(message).__struct_fields__:
        spoilt = tree(message)
        if (type(message).__name__, name) in HAVE_DEFAULTS:
            continue
        del spoilt[name]
        with pytest.raises(MessageError):
            decode(pack(spoilt))


@pytest.mark.parametrize("name", ["", "a b", "a\n", "\n", "a" * 129, "a\0", "é", "../x", "a;b", None, 7])
def test_names_are_plain(name):
    with pytest.raises(MessageError):
        decode_from_worker(pack(tree(HEARTBEAT) | {"generation": name}))


@pytest.mark.parametrize("name", ["a", "a" * 128, "Az09_.:-"])
def test_plain_names_are_taken(name):
    assert decode_from_worker(pack(tree(HEARTBEAT) | {"generation": name})).generation == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 2.5),
        ("max_tokens", "7"),
        ("seed", 1 << 63),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -math.inf),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"x": 0.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("stop_token_ids", list(range(1025))),
        ("stop_token_ids", [1 << 31]),
        ("ignore_eos", 1),
        ("choice_index", -1),
        ("num_logprobs", -1),
        ("num_logprobs", 21),
        ("num_logprobs", True),
        ("num_prompt_logprobs", 21),
        ("num_prompt_logprobs", 1.0),
        ("grammar", {"kind": "regex", "text": "", "vocabulary": "v"}),
        ("grammar", {"kind": "regex", "text": "a" * (MAX_GRAMMAR_CHARS + 1), "vocabulary": "v"}),
        ("grammar", {"kind": "regexp", "text": "a", "vocabulary": "v"}),
        ("grammar", {"kind": "regex", "text": b"a", "vocabulary": "v"}),
        ("grammar", {"kind": "regex", "text": "a"}),
        ("grammar", {"kind": "regex", "text": "a", "vocabulary": "v" * 2049}),
        ("grammar", "a"),
        ("bad_words", [[]]),
        ("bad_words", [[1 << 31]]),
        ("bad_words", [[1] * 257]),
        ("bad_words", [[1]] * 257),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [0] * ((1 << 18) + 1)),
    ],
)
def test_sampling_fields_out_of_range_are_refused(field, value):
    spoilt = tree(PREFILL_REQUEST)
    spoilt["request"]["sampling"][field] = value
    with pytest.raises(MessageError):
        decode_from_gateway(pack(spoilt))


@pytest.mark.parametrize(
    "siblings",
    [None, [["s"]], [["s", -1]], [["a b", 1]], [{"request_id": "s"}], [{"request_id": "s", "choice_index": 1}] * 128],
)
def test_siblings_out_of_range_are_refused(siblings):
    with pytest.raises(MessageError):
        decode_from_gateway(pack(tree(PREFILL_REQUEST) | {"siblings": siblings}))


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        [[1]],
        {"a b": [1]},
        {"s": [-1]},
        {"s": []},
        {"s": 1},
        {"s": [1, [0.5, 1, []]]},
        {1: [1]},
        {f"s{index}": [1] for index in range(128)},
    ],
)
def test_first_tokens_of_siblings_out_of_range_are_refused(tokens):
    with pytest.raises(MessageError):
        decode_from_prefill(pack(tree(FROM_PREFILL[3]) | {"siblings": tokens}))
    decode_from_prefill(pack(tree(FROM_PREFILL[3]) | {"siblings": {f"s{index}": [1] for index in range(127)}}))


@pytest.mark.parametrize(
    "told",
    [
        [],
        [-0.5],
        [math.nan, 1, []],
        [-math.inf, 1, []],
        [0.5, 1, []],
        [-10_000.0, 1, []],
        [-0.5, 0, []],
        [-0.5, 1, [[7]]],
        [-0.5, 1, [[7, -0.5, 1]]],
        [-0.5, 1, [[-1, -0.5]]],
        [-0.5, 1, [[7, math.nan]]],
        [-0.5, 1, [[7, -0.5]] * 21],
        [-0.5, 1, [], 1],
        {"logprob": -0.5, "rank": 1, "top": []},
    ],
)
def test_log_probabilities_out_of_range_are_refused(told):
    spoilt = tree(FROM_WORKER[3])
    for place, key in ((spoilt["outputs"][0], "logprobs"), (spoilt["outputs"][0]["prompt_logprobs"], "tokens")):
        before, place[key] = place[key], [told]
        with pytest.raises(MessageError):
            decode_from_worker(pack(spoilt))
        place[key] = before
    decode_from_worker(pack(spoilt))


@pytest.mark.parametrize("prompt", [[], [-1], [1 << 31], [None], "abc", [0] * (MAX_PROMPT_TOKENS + 1)])
def test_prompts_out_of_range_are_refused(prompt):
    spoilt = tree(PREFILL_REQUEST)
    spoilt["request"]["prompt_token_ids"] = prompt
    with pytest.raises(MessageError):
        decode_from_gateway(pack(spoilt))


def test_a_list_that_claims_four_billion_entries_is_refused_before_it_is_made():
    claim = b"\xdd\xff\xff\xff\xff"
    frame = encode(StepOutput("g", 1, ()))
    assert frame.endswith(b"\x90")
    with pytest.raises(MessageError):
        decode_from_worker(frame[:-1] + claim)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x90" * 10,
        b"\x91" * 500_000,
        b"\x82\xa1z" + b"\x91" * 500_000 + b"\xc0",
        b"\x81\xa4type\xa7Welcomf",
        b"\x81\xa4type\xc0",
        b"\xd6\xff\xff\xff\xff\xff",
        pack({"type": "Welcome", "epoch": b"e"}),
        b"\x82\xa4type\xa7Welcome\xa5epoch\xa2\xff\xfe",
    ],
)
def test_hostile_frames_are_refused(frame):
    for decode in DIRECTIONS:
        with pytest.raises(MessageError):
            decode(frame)


def test_a_frame_above_the_bound_is_refused_unread():
    with pytest.raises(MessageError, match=str(MAX_CONTROL_BYTES + 1)):
        decode_from_worker(bytes(MAX_CONTROL_BYTES + 1))


def test_an_error_never_quotes_at_length_or_across_lines():
    with pytest.raises(MessageError) as caught:
        decode_from_worker(pack(tree(HEARTBEAT) | {"x\n" * 10_000: 1}))
    assert len(str(caught.value)) < 2 * MAX_ERROR_CHARS
    assert "\n" not in str(caught.value)


def test_a_message_of_several_frames_is_an_error_value():
    frame = encode(HEARTBEAT)
    assert decode_from_worker.or_error([frame]) == HEARTBEAT
    assert isinstance(decode_from_worker.or_error([frame, frame]), MessageError)
    assert isinstance(decode_from_worker.or_error([]), MessageError)
    assert isinstance(decode_from_worker.or_error([b"\xc1"]), MessageError)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(frame=st.binary(max_size=64))
def test_random_bytes_are_refused(frame):
    for decode in DIRECTIONS:
        with pytest.raises(MessageError):
            decode(frame)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=st.sampled_from(CASES), data=st.data(), value=VALUES)
def test_a_message_with_one_field_replaced_decodes_or_is_refused(case, data, value):
    decode, message = case
    spoilt = tree(message)
    spoilt[data.draw(st.sampled_from(sorted(spoilt)))] = value
    try:
        decoded = decode(pack(spoilt))
    except MessageError:
        return
    assert decode(encode(decoded)) == decoded


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=st.sampled_from(CASES), data=st.data())
def test_a_message_with_bytes_flipped_decodes_or_is_refused(case, data):
    decode, message = case
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(frame))
    except MessageError:
        return
    assert type(decoded) in {type(known) for known in DIRECTIONS[decode]}


def test_which_ends_are_errors():
    errors = {reason for reason in EndReason if reason.is_error}
    assert errors == {EndReason.REJECTED, EndReason.OVERLOADED, EndReason.FAILED}
    assert {reason.value for reason in EndReason} == {
        *("stop", "length", "handed_over", "cancelled", "rejected", "overloaded", "failed")
    }
