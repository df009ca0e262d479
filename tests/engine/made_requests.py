"""Requests with a prompt, an output so far, and sampling parameters."""

from engine.request import Request
from kvtransfer.request_parts import RequestSpec, SamplingParams


def request_with(output=(), *, prompt=(4, 5, 6), **sampling) -> Request:
    """A request whose parameters are `sampling` beside max_tokens 8 and seed 0."""
    params = SamplingParams(**{"max_tokens": 8, "seed": 0, **sampling})
    request = Request(RequestSpec("r", 0, tuple(prompt), params), gateway="g")
    request.output_token_ids += output
    return request
