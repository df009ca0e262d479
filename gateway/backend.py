"""What the HTTP face needs from the cluster behind it: one interface, one error tree.

BackendError            an error that has a client-safe text and an HTTP status
├── InvalidRequestError     400: the request can never be served (too long, token id out of range)
├── UnknownWorkerError      404: an operator names a worker that is not there
├── ConflictError           409: what an operator wants does not go with how the cluster is now
├── OverloadedError         429: queues are full, try later
├── UnavailableError        503: no prefill or no decode worker
├── RequestFailedError      502 after the start: a worker died or failed on the way
└── DeadlineExceededError   504 after the start: it took longer than it may
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.gathering import Gathering
from gateway.modes import Mode
from kvtransfer.request_parts import EndReason, SamplingParams, TokenLogprob


class BackendError(Exception):
    """Root; `str(error)` is a fixed text that may be shown to a client."""

    status = 500
    kind = "server_error"


class InvalidRequestError(BackendError):
    """The request can never be served here."""

    status = 400
    kind = "invalid_request_error"


class UnknownWorkerError(BackendError):
    """There is no live worker of this id."""

    status = 404
    kind = "not_found_error"


class ConflictError(BackendError):
    """Not as things are now; says why."""

    status = 409
    kind = "conflict_error"


class OverloadedError(BackendError):
    """Bounded queues are full."""

    status = 429
    kind = "overloaded_error"


class UnavailableError(BackendError):
    """No worker of some role can make progress; says which."""

    status = 503
    kind = "service_unavailable"


class RequestFailedError(BackendError):
    """The request started and could not be finished (worker lost, internal failure)."""

    status = 502
    kind = "upstream_error"


class DeadlineExceededError(BackendError):
    """The request started and took longer than this server allows."""

    status = 504
    kind = "timeout_error"


@dataclass(frozen=True)
class TokenDelta:
    """New output tokens of one request, in order and without gaps; `finish` is set on the last delta only
    (STOP or LENGTH; errors are raised as BackendError instead). `num_cached`, on the first one: prompt tokens whose KV
    was found in a prefix cache. `logprobs`: one a token, if the sampling asks for them. `prompt_logprobs`, on the first
    one if the sampling asks for them: one for each token of the prompt behind its first."""

    token_ids: tuple[int, ...]
    finish: EndReason | None
    num_cached: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Traits:
    """What a request says of itself beside prompt and sampling. `cache_salt`: it shares KV only with requests of the
    same salt; `priority`: the smaller, the sooner, where workers schedule by it; `mode`: where it wants its prompt
    computed, None if it leaves that to the gateway. `is_step`: it is one of many of a call, of which metrics count
    another one."""

    cache_salt: str = ""
    priority: int = 0
    mode: Mode | None = None
    is_step: bool = False


@dataclass(frozen=True)
class ClusterStatus:
    """Whether requests can be served. `reasons` says why not, one text a missing thing; clients see them, so they name
    roles and no workers. `eos_token_ids`: with which the model ends an output."""

    ready: bool
    reasons: tuple[str, ...]
    max_model_len: int | None  # the smallest of the workers that are needed; None while not ready
    eos_token_ids: frozenset[int] = frozenset()


class Backend(Protocol):
    """Runs one request on the workers."""

    def status(self, mode: Mode | None = None) -> ClusterStatus:
        """The cluster as it is now for requests of a mode, None being that of requests which ask for none."""
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        traits: Traits,
        *,
        arrived_at: float,
        note_mode: Callable[[Mode], None] | None = None,
        gathering: Gathering[Any] | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Dispatches at the first `__anext__` and yields tokens as they come. Closing the iterator (`aclose`) before
        its end cancels the request on all workers. `arrived_at`: when the client's call came, monotonic seconds.
        `note_mode` is told, before the first token, where the prompt goes. `gathering`: requests that differ in their
        choice index alone, and begin together.
        Raises BackendError subclasses, DeadlineExceededError among them: callers need no time limit of their own."""
        ...

    def reset_prefix_cache(self) -> None:
        """From now on no request is served from what earlier ones have left on the workers. Raises UnavailableError if
        a worker can't be told."""
        ...
