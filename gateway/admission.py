"""What the gateway checks of a request before any worker sees it; workers check again.

A message out of the protocol's bounds would cost this gateway its connection, so nothing leaves that would not decode.
"""

from typing import Any

import msgspec

from gateway.backend import InvalidRequestError
from kvtransfer.request_parts import MAX_PROMPT_LOGPROBS, MAX_PROMPT_TOKENS, SamplingParams


def check_request(prompt: tuple[int, ...], sampling: SamplingParams, *, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequestError, with both numbers where a bound is passed. `prompt`: token ids."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    longest = min(max_model_len, MAX_PROMPT_TOKENS)
    if len(prompt) >= longest:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, but prompt and output together may have at most {longest}"
        )
    total = len(prompt) + sampling.max_tokens
    if total > max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}: "
            f"together {total}, but at most {max_model_len} are possible"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequestError(
            f"the prompt has a token id outside of the vocabulary, which ends at {vocab_size - 1}"
        )
    num_top = sampling.num_prompt_logprobs
    if num_top is not None and (1 + num_top) * len(prompt) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"the log probabilities of {len(prompt)} prompt tokens, each with {num_top} alternatives, are more than "
            f"the {MAX_PROMPT_LOGPROBS} that one prompt may have"
        )
    _check_sampling(sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    builtins: Any = msgspec.to_builtins(sampling, str_keys=False)
    try:
        msgspec.convert(builtins, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError("a sampling parameter is out of range") from error
