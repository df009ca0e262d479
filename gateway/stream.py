"""From the control loop to the consumer of one request: tokens wait within a bound, and the end comes behind them."""

import asyncio
from collections import deque

from gateway.backend import BackendError, TokenDelta


class TokenStream:
    """At most `limit` tokens wait; pushing never blocks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deltas: deque[TokenDelta] = deque()
        self._num_tokens = 0
        self._error: BackendError | None = None
        self._changed = asyncio.Event()

    def push(self, delta: TokenDelta) -> bool:
        """Queues new tokens; False if there is no room for them."""
        if self._num_tokens + len(delta.token_ids) > self._limit:
            return False
        self._deltas.append(delta)
        self._num_tokens += len(delta.token_ids)
        self._changed.set()
        return True

    def fail(self, error: BackendError) -> None:
        """What is queued still reaches the consumer, then the error does."""
        assert self._error is None, f"failed twice: {self._error}, then {error}"
        self._error = error
        self._changed.set()

    async def get(self) -> TokenDelta:
        """The next tokens; raises the BackendError that ended the request."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        delta = self._deltas.popleft()
        self._num_tokens -= len(delta.token_ids)
        return delta
