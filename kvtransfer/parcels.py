"""Cuts what a step has for one gateway into messages that a gateway takes. Pure.

Tokens are few in a step; the log probabilities of many prompts at once may not fit one control frame.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from kvtransfer.request_parts import RequestOutput, TokenLogprob

MAX_PARCEL_LOGPROBS: Final = 1 << 19
"""In one message, alternatives included; one takes at most 18 bytes, so all of them 9.5 MB."""


def parcels(outputs: Sequence[RequestOutput]) -> Iterator[tuple[RequestOutput, ...]]:
    """`outputs` in order, in as few parts as the bound allows; a single output never passes it."""
    part: list[RequestOutput] = []
    size = 0
    for output in outputs:
        more = num_logprobs(output)
        if part and size + more > MAX_PARCEL_LOGPROBS:
            yield tuple(part)
            part, size = [], 0
        part.append(output)
        size += more
    if part:
        yield tuple(part)


def num_logprobs(output: RequestOutput) -> int:
    """Log probabilities in an output, those of alternatives too."""
    prompt = () if output.prompt_logprobs is None else output.prompt_logprobs.tokens
    return _count(output.logprobs) + _count(prompt)


def _count(told: Sequence[TokenLogprob]) -> int:
    return sum(1 + len(logprob.top) for logprob in told)
