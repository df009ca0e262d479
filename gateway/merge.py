"""Merges what two workers say about one attempt's output tokens into one sequence without gaps or repeats.

    index      0 .. base-1      base      base+1   base+2 ...
    known      resumed
    prefill                     t0
    decode                     (t0)       t1       t2 ...      decode may repeat t0, and may be heard before prefill

Where decode is alone with the attempt, token `base` is its own to say.

With each token comes its log probability, if the request asks for that. These are kept until somebody takes them.

Each worker's words arrive in order, so the only gap that can fill later is token `base`; any other is a lost message.
"""

from collections.abc import Sequence

from gateway.backend import RequestFailedError
from kvtransfer.request_parts import TokenLogprob
from kvtransfer.worker_facts import Role

_Said = tuple[int, TokenLogprob | None]


class InconsistentOutputError(RequestFailedError):
    """Workers contradict each other, or a message was lost. The text has no client or worker data."""


class TokenMerge:
    """Output tokens [0, length) are known, `resumed` from the start; decode's tokens behind the first new one wait in
    `_early` while that one is not. `is_decode_alone`: nobody else speaks. `with_logprobs`: each token comes with its
    own; `untaken`: those of the last of `resumed` that nobody has taken yet."""

    def __init__(
        self,
        max_tokens: int,
        max_early: int,
        resumed: Sequence[int] = (),
        *,
        is_decode_alone: bool = False,
        with_logprobs: bool = False,
        untaken: Sequence[TokenLogprob] = (),
    ) -> None:
        self._max_tokens = max_tokens
        self._max_early = max_early
        self._base = len(resumed)
        self._tokens: list[int] = list(resumed)
        self._early: list[_Said] = []
        self._with_logprobs = with_logprobs
        self._untaken: list[TokenLogprob] = list(untaken)
        self._next = {Role.PREFILL: self._base, Role.DECODE: self._base + (0 if is_decode_alone else 1)}
        self._spoken: set[Role] = set()

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens known without a gap."""
        return self._tokens

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def num_new(self) -> int:
        """Tokens known that this attempt has given."""
        return self.length - self._base

    def has_spoken(self, role: Role) -> bool:
        """Whether any token has come from that worker."""
        return role in self._spoken

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the last of `tokens`, those that nobody has taken yet; none if they don't come."""
        taken, self._untaken = tuple(self._untaken), []
        return taken

    def add(self, role: Role, start: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Takes tokens [start, start + len(token_ids)). Raises InconsistentOutputError."""
        if start > self._next[role]:
            raise InconsistentOutputError(f"output tokens {self._next[role]} to {start - 1} were lost on the way")
        if len(logprobs) != len(token_ids) * self._with_logprobs:
            raise InconsistentOutputError("log probabilities are missing, or were not asked for")
        told = logprobs if self._with_logprobs else [None] * len(token_ids)
        for index, said in enumerate(zip(token_ids, told, strict=True), start):
            self._place(index, said)
        if token_ids:
            self._spoken.add(role)
            self._next[role] = max(self._next[role], start + len(token_ids))

    def _place(self, index: int, said: _Said) -> None:
        if index >= self._max_tokens:
            raise InconsistentOutputError(f"more than the {self._max_tokens} output tokens asked for")
        num_known, token_id = self.length, said[0]
        if index < num_known:
            self._compare(self._tokens[index], token_id, index)
        elif index == num_known:
            self._append([said, *self._early])
            self._early = []
        elif index <= num_known + len(self._early):
            self._compare(self._early[index - num_known - 1][0], token_id, index)
        else:
            self._keep_early(said)

    def _append(self, said: Sequence[_Said]) -> None:
        self._tokens += [token_id for token_id, _ in said]
        self._untaken += [logprob for _, logprob in said if logprob is not None]

    def _keep_early(self, said: _Said) -> None:
        if len(self._early) >= self._max_early:
            raise InconsistentOutputError("the first output token was lost on the way")
        self._early.append(said)

    @staticmethod
    def _compare(known: int, token_id: int, index: int) -> None:
        if known != token_id:
            raise InconsistentOutputError(f"the workers disagree about output token {index}")
