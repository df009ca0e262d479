"""Merges what two workers say about one attempt's output tokens into one sequence without gaps or repeats.

    index      0 .. base-1      base      base+1   base+2 ...
    known      resumed
    prefill                     t0
    decode                     (t0)       t1       t2 ...      decode may repeat t0, and may be heard before prefill

Where decode is alone with the attempt, token `base` is its own to say.

Each worker's words arrive in order, so the only gap that can fill later is token `base`; any other is a lost message.
"""

from collections.abc import Sequence

from gateway.backend import RequestFailedError
from kvtransfer.messages import Role


class InconsistentOutputError(RequestFailedError):
    """Workers contradict each other, or a message was lost. The text has no client or worker data."""


class TokenMerge:
    """Output tokens [0, length) are known, `resumed` from the start; decode's tokens behind the first new one wait in
    `_early` while that one is not. `is_decode_alone`: nobody else speaks."""

    def __init__(
        self, max_tokens: int, max_early: int, resumed: Sequence[int] = (), *, is_decode_alone: bool = False
    ) -> None:
        self._max_tokens = max_tokens
        self._max_early = max_early
        self._base = len(resumed)
        self._tokens: list[int] = list(resumed)
        self._early: list[int] = []
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

    def add(self, role: Role, start: int, token_ids: Sequence[int]) -> None:
        """Takes tokens [start, start + len(token_ids)). Raises InconsistentOutputError."""
        if start > self._next[role]:
            raise InconsistentOutputError(f"output tokens {self._next[role]} to {start - 1} were lost on the way")
        for index, token_id in enumerate(token_ids, start):
            self._place(index, token_id)
        if token_ids:
            self._spoken.add(role)
            self._next[role] = max(self._next[role], start + len(token_ids))

    def _place(self, index: int, token_id: int) -> None:
        if index >= self._max_tokens:
            raise InconsistentOutputError(f"more than the {self._max_tokens} output tokens asked for")
        num_known = self.length
        if index < num_known:
            self._compare(self._tokens[index], token_id, index)
        elif index == num_known:
            self._tokens += [token_id, *self._early]
            self._early = []
        elif index <= num_known + len(self._early):
            self._compare(self._early[index - num_known - 1], token_id, index)
        else:
            self._keep_early(token_id)

    def _keep_early(self, token_id: int) -> None:
        if len(self._early) >= self._max_early:
            raise InconsistentOutputError("the first output token was lost on the way")
        self._early.append(token_id)

    @staticmethod
    def _compare(known: int, token_id: int, index: int) -> None:
        if known != token_id:
            raise InconsistentOutputError(f"the workers disagree about output token {index}")
