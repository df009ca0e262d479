"""What a step has for a gateway, cut into messages of bounded size."""

from kvtransfer.codec import MAX_CONTROL_BYTES, encode
from kvtransfer.messages import StepOutput, decode_from_worker
from kvtransfer.parcels import MAX_PARCEL_LOGPROBS, num_logprobs, parcels
from kvtransfer.request_parts import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_TOKEN_ID,
    MIN_LOGPROB,
    PromptLogprobs,
    RequestOutput,
    TokenLogprob,
)

LARGEST = TokenLogprob(MIN_LOGPROB / 3, 1 << 31, ((MAX_TOKEN_ID, MIN_LOGPROB / 7),) * MAX_LOGPROBS)
MOST = MAX_PROMPT_LOGPROBS // (1 + MAX_LOGPROBS) - 1


def output(name: str, num_scored: int) -> RequestOutput:
    scored = PromptLogprobs(1, (LARGEST,) * num_scored) if num_scored else None
    return RequestOutput(name, 0, 0, (5,), logprobs=(LARGEST,), prompt_logprobs=scored)


def test_what_is_small_goes_in_one_message():
    outputs = tuple(output(f"r{index}", 3) for index in range(20))
    assert list(parcels(outputs)) == [outputs]
    assert list(parcels(())) == []


def test_what_is_large_is_cut_and_every_message_is_taken():
    outputs = [output(f"r{index}", MOST) for index in range(5)]
    parts = list(parcels(outputs))
    assert [output for part in parts for output in part] == outputs
    assert [len(part) for part in parts] == [2, 2, 1]
    for number, part in enumerate(parts, 1):
        assert sum(map(num_logprobs, part)) <= MAX_PARCEL_LOGPROBS
        frame = encode(StepOutput("g", number, part))
        assert len(frame) < MAX_CONTROL_BYTES
        assert decode_from_worker(frame).outputs == part


def test_a_full_parcel_of_single_logprobs_fits_too():
    """The most bytes a log probability: without alternatives it has a frame of its own."""
    bare = TokenLogprob(MIN_LOGPROB / 3, 1 << 31)
    part = RequestOutput("r", 0, 0, prompt_logprobs=PromptLogprobs(1, (bare,) * MAX_PROMPT_LOGPROBS))
    frame = encode(StepOutput("g", 1, (part, part)))
    assert 2 * num_logprobs(part) == MAX_PARCEL_LOGPROBS
    assert len(frame) < MAX_CONTROL_BYTES
