"""Merges what two workers say about one request's output tokens into one sequence without gaps or repeats.

    index      0        1   2   3   ...
    prefill    t0
    decode    (t0)      t1  t2  t3  ...      decode may repeat t0, and may be heard before prefill

Each worker's words arrive in order, so the only gap that can fill later is token 0; any other is a lost message.
"""

from collections.abc import Sequence

from gateway.backend import RequestFailedError
from kvtransfer.messages import Role


class InconsistentOutputError(RequestFailedError):
    """Workers contradict each other, or a message was lost. The text has no client or worker data."""


class TokenMerge:
    """Output tokens [0, length) are known; decode's tokens [1, ...) wait in `_early` while token 0 is not."""

    def __init__(self, max_tokens: int, max_early: int) -> None:
        self._max_tokens = max_tokens
        self._max_early = max_early
        self._tokens: list[int] = []
        self._early: list[int] = []
        self._next = {Role.PREFILL: 0, Role.DECODE: 1}
        self._spoken: set[Role] = set()

    @property
    def length(self) -> int:
        """Number of tokens known without a gap."""
        return len(self._tokens)

    def has_spoken(self, role: Role) -> bool:
        """Whether any token has come from that worker."""
        return role in self._spoken

    def add(self, role: Role, start: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Takes tokens [start, start + len(token_ids)) and returns those that became known, in order.

        Raises InconsistentOutputError.
        """
        if start > self._next[role]:
            raise InconsistentOutputError(f"output tokens {self._next[role]} to {start - 1} were lost on the way")
        before = self.length
        for index, token_id in enumerate(token_ids, start):
            self._place(index, token_id)
        if token_ids:
            self._spoken.add(role)
            self._next[role] = max(self._next[role], start + len(token_ids))
        return tuple(self._tokens[before:])

    def _place(self, index: int, token_id: int) -> None:
        if index >= self._max_tokens:
            raise InconsistentOutputError(f"more than the {self._max_tokens} output tokens asked for")
        if index < self.length:
            self._compare(self._tokens[index], token_id, index)
        elif index == self.length:
            self._tokens += [token_id, *self._early]
            self._early = []
        elif index <= len(self._early):
            self._compare(self._early[index - 1], token_id, index)
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
