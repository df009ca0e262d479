"""When a request is done: the rules that look at tokens only. Knows no torch.

output tokens   0 ............ min_tokens ............ max_tokens
                | never STOP   | STOP on a stop id     | LENGTH at the latest
"""

from collections.abc import Set as AbstractSet

from engine.request import Request
from kvtransfer.request_parts import EndReason, SamplingParams


def stop_ids(sampling: SamplingParams, eos_token_ids: AbstractSet[int]) -> AbstractSet[int]:
    """Token ids that end this request: its own stop ids and, unless `ignore_eos`, the model's EOS ids."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def finish_reason(request: Request, eos_token_ids: AbstractSet[int], max_model_len: int) -> EndReason | None:
    """Why the request ends with the output token that was just appended, or None while it goes on.

    A stop id that is also the last token allowed counts as STOP: the model was done.
    """
    sampling, num_output = request.sampling, len(request.output_token_ids)
    assert num_output > 0, f"request {request.key} has no output token yet"
    last = request.output_token_ids[-1]
    if num_output >= sampling.min_tokens and last in stop_ids(sampling, eos_token_ids):
        return EndReason.STOP
    if num_output >= sampling.max_tokens or request.num_tokens >= max_model_len:
        return EndReason.LENGTH
    return None
