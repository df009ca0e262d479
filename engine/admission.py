"""What a worker checks of a request before it takes it in, although the gateway has checked it too. Knows no torch.

A gateway may be older, newer or wrong; an id out of vocabulary would be an index error in the middle of a batch that
is not this request's alone. Ranges of single fields are held by `kvtransfer.request_parts` while decoding.
"""

import math
from collections.abc import Iterator, Sequence

from engine.errors import RejectedError
from kvtransfer.request_parts import MAX_PROMPT_LOGPROBS, RequestSpec, SamplingParams


def check_spec(
    spec: RequestSpec, *, vocab_size: int, max_model_len: int, pool_tokens: int, holds_output: bool = True
) -> None:
    """Raises RejectedError, fit for the client, if this worker can never serve `spec`.

    `pool_tokens`: tokens that the worker's KV pool holds. `holds_output`: whether the output's KV stays here too
    (decode, colocated); prefill needs room for the prompt and the output so far.
    """
    _check_length(spec, max_model_len)
    _check_output(spec)
    _check_pool(spec, pool_tokens, holds_output)
    _check_vocabulary(spec, vocab_size)
    _check_finite(spec.sampling)
    _check_prompt_logprobs(spec)
    if spec.sampling.min_tokens > spec.sampling.max_tokens:
        raise RejectedError(
            f"min_tokens is {spec.sampling.min_tokens}, more than max_tokens, which is {spec.sampling.max_tokens}"
        )
    if spec.sampling.grammar is not None and spec.sampling.ignore_eos:
        raise RejectedError("ignore_eos does not go with a grammar: nothing may follow the end of its output")


def check_group(specs: Sequence[RequestSpec], max_members: int) -> None:
    """Raises RejectedError if the choices of a group can't run together here. They differ in their ids alone, so what
    `check_spec` says of one holds for all."""
    if len({spec.request_id for spec in specs}) < len(specs):
        raise RejectedError("two choices of the request have the same id")
    if len(specs) > 1 and specs[0].sampling.num_prompt_logprobs is not None:
        raise RejectedError("log probabilities of a prompt are told of one choice alone")
    if len(specs) > max_members:
        raise RejectedError(f"the request has {len(specs)} choices in one group, but {max_members} can run at once")


def _check_length(spec: RequestSpec, max_model_len: int) -> None:
    num_prompt, max_tokens = len(spec.prompt_token_ids), spec.sampling.max_tokens
    if num_prompt >= max_model_len:
        raise RejectedError(
            f"the prompt has {num_prompt} tokens, but with at least one output token at most "
            f"{max_model_len - 1} fit the model's length of {max_model_len}"
        )
    if num_prompt + max_tokens > max_model_len:
        raise RejectedError(
            f"the prompt's {num_prompt} tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}, "
            f"but the model's length is {max_model_len}"
        )


def _check_output(spec: RequestSpec) -> None:
    num_output, max_tokens = len(spec.output_token_ids), spec.sampling.max_tokens
    if num_output >= max_tokens:
        raise RejectedError(f"the request has {num_output} output tokens already, and max_tokens is {max_tokens}")


def _check_pool(spec: RequestSpec, pool_tokens: int, holds_output: bool) -> None:
    num_prompt, max_tokens = len(spec.prompt_token_ids), spec.sampling.max_tokens
    # The last output token is never fed back, so its KV is never stored.
    num_output = max_tokens - 1 if holds_output else len(spec.output_token_ids)
    num_needed = num_prompt + num_output
    if num_needed > pool_tokens:
        raise RejectedError(f"the request needs KV cache for {num_needed} tokens, but all of it holds {pool_tokens}")


def _check_prompt_logprobs(spec: RequestSpec) -> None:
    num_top = spec.sampling.num_prompt_logprobs
    if num_top is not None and (1 + num_top) * len(spec.prompt_token_ids) > MAX_PROMPT_LOGPROBS:
        raise RejectedError(
            f"the log probabilities of {len(spec.prompt_token_ids)} prompt tokens, each with {num_top} alternatives, "
            f"are more than {MAX_PROMPT_LOGPROBS}"
        )


def _check_vocabulary(spec: RequestSpec, vocab_size: int) -> None:
    for what, token_id in _named_token_ids(spec):
        if not 0 <= token_id < vocab_size:
            raise RejectedError(f"{what} holds token id {token_id}, but the vocabulary has {vocab_size} tokens")


def _named_token_ids(spec: RequestSpec) -> Iterator[tuple[str, int]]:
    """The least and the greatest id of each field that holds token ids."""
    fields = {
        "the prompt": spec.prompt_token_ids,
        "the output": spec.output_token_ids,
        "logit_bias": tuple(spec.sampling.logit_bias),
        "stop_token_ids": spec.sampling.stop_token_ids,
        "allowed_token_ids": spec.sampling.allowed_token_ids,
        "bad_words": tuple(token_id for sequence in spec.sampling.bad_words for token_id in sequence),
    }
    for what, token_ids in fields.items():
        if token_ids:
            yield what, min(token_ids)
            yield what, max(token_ids)


def _check_finite(sampling: SamplingParams) -> None:
    fields = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    values = {name: getattr(sampling, name) for name in fields}
    values |= {f"logit_bias of token {token_id}": bias for token_id, bias in sampling.logit_bias.items()}
    for what, value in values.items():
        if not math.isfinite(value):
            raise RejectedError(f"{what} is {value}, not a finite number")
