"""From the fields of a request to the sampling parameters that workers get."""

import secrets

from gateway.constraints import Constraints
from gateway.errors import ContextLengthError, InvalidFieldError
from gateway.prompts import check_token_ids
from gateway.schemas import GenerationRequest
from kvtransfer.request_parts import SamplingParams


def draw_seed(default: int | None) -> int:
    """The seed of a request that brings none: the operator's, or a fresh one of 63 bits."""
    return secrets.randbits(63) if default is None else default


def check_sampling_ids(request: GenerationRequest, num_ids: int) -> None:
    """Raises InvalidFieldError for token ids out of the vocabulary."""
    check_token_ids("stop_token_ids", request.stop_token_ids, num_ids)
    check_token_ids("logit_bias", list(request.logit_bias), num_ids)
    check_token_ids("allowed_token_ids", request.allowed_token_ids or [], num_ids)


def sampling_for(
    request: GenerationRequest,
    num_prompt: int,
    *,
    max_model_len: int,
    default_max_tokens: int,
    seed: int,
    constraints: Constraints,
) -> SamplingParams:
    """Parameters for the first choice of one prompt of `num_prompt` tokens, fewer than `max_model_len`.

    Without a `max_tokens`, the output may have `default_max_tokens` or what the model has room for. Raises
    ContextLengthError, InvalidFieldError.
    """
    max_tokens = _max_tokens(request.asked_max_tokens, num_prompt, max_model_len, default_max_tokens)
    if request.min_tokens > max_tokens:
        raise InvalidFieldError(
            f"min_tokens: {request.min_tokens} is more than max_tokens, which is {max_tokens}", param="min_tokens"
        )
    # Where nothing is to be generated, the token that comes with the prompt's computation is not shown.
    return _parameters(request, max(1, max_tokens), seed, constraints)


def _parameters(request: GenerationRequest, max_tokens: int, seed: int, constraints: Constraints) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=tuple(request.stop_token_ids),
        # Ranking needs each token's own log probability, also if the client is told nothing.
        num_logprobs=0 if request.num_logprobs is None and request.is_ranked else request.num_logprobs,
        num_prompt_logprobs=request.num_scores,
        grammar=constraints.grammar,
        bad_words=constraints.bad_words,
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
    )


def _max_tokens(asked: int | None, num_prompt: int, max_model_len: int, default: int) -> int:
    room = max_model_len - num_prompt
    assert room > 0, f"a prompt of {num_prompt} tokens passed the check against {max_model_len}"
    if asked is None:
        return min(default, room)
    if asked > room:
        raise ContextLengthError(
            f"max_tokens: the prompt has {num_prompt} tokens and max_tokens is {asked}, together {num_prompt + asked}, "
            f"but this model takes at most {max_model_len}",
            param="max_tokens",
        )
    return asked
