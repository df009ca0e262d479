"""The blocks of requests: found by what they hold, taken, named once they are full, and given back.

Knows no torch, socket or clock, and no queues: who gets blocks, and when, is the schedulers'. The pool knows owners and
no tokens; here is what of a request's tokens its blocks hold:

    | b0 | b1 | b2 | b3 |           num_computed = 2 blocks and a bit: b0 and b1 have names, b2 is partly filled, and
    |<- computed ->|                b3 waits for tokens whose KV is on its way (or is waste, if none is)
"""

from collections.abc import Iterable, Sequence

from engine.block_pool import BlockPool
from engine.prefix_hash import BlockNames
from engine.request import Request, RequestState
from kvtransfer.codec import RequestKey


class RequestBlocks:
    """What requests have of a pool. `share_prefixes`: whether blocks are found again by what they hold."""

    def __init__(self, pool: BlockPool, *, share_prefixes: bool) -> None:
        self._pool = pool
        self._share_prefixes = share_prefixes
        self._names: dict[RequestKey, BlockNames] = {}

    def find_cached(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks that hold the KV of the request's first tokens already, of `num_tokens` at most."""
        if not self._share_prefixes or request.scores_prompt:
            return []
        num_full = num_tokens // self._pool.block_size
        return self._pool.find(self._names_of(request, num_full)[:num_full])

    def take(self, request: Request, num_tokens: int, cached: Sequence[int]) -> None:
        """Gives a request without blocks room for `num_tokens` tokens, the first of them in the blocks `cached`."""
        assert not request.block_ids, request.key
        self._pool.share(cached, owner=request.key)
        request.num_computed = len(cached) * self._pool.block_size
        fresh = self._pool.allocate(num_tokens - request.num_computed, owner=request.key)
        request.block_ids = [*cached, *fresh]

    def take_first(self, request: Request, num_tokens: int, cached: Sequence[int]) -> None:
        """Of a request that is admitted: what is found of its prompt now counts, not what is found of itself after a
        preemption."""
        self.take(request, num_tokens, cached)
        request.num_cached = request.num_computed
        for follower in request.followers:
            follower.num_cached = request.num_computed
        self._pool.note_lookup(num_tokens, request.num_cached)

    def note_computed(self, request: Request, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in the pool: full blocks can be shared from now on."""
        size = self._pool.block_size
        before, request.num_computed = request.num_computed // size, num_tokens
        full = num_tokens // size
        if self._share_prefixes and full > before:
            names = self._names_of(request, full)
            for index in range(before, full):
                self._pool.name(request.block_ids[index], names[index])

    def fork(self, leader: Request, follower: Request) -> None:
        """`follower`, which has none, owns all that `leader` has as well."""
        self._pool.share(leader.block_ids, owner=follower.key)
        follower.block_ids = list(leader.block_ids)
        follower.num_computed = leader.num_computed
        if names := self._names.get(leader.key):
            self._names[follower.key] = names.copy()

    def give_back(self, request: Request) -> None:
        """Frees a request's blocks; what they hold can still be shared."""
        self._pool.free(request.block_ids, owner=request.key)
        request.block_ids = []

    def forget(self, request: Request) -> None:
        """Gives back what it has, and it will not come again."""
        self.give_back(request)
        self._names.pop(request.key, None)

    def waste(self, requests: Iterable[Request]) -> float:
        """Share of the slots in owned blocks that hold no token and that none is on its way to; a block that several
        share counts once, as its fullest owner sees it."""
        size = self._pool.block_size
        slots = self._pool.num_used * size
        spare: dict[int, int] = {}
        for request in requests:
            filled = _num_meant(request)
            for index in range(filled // size, len(request.block_ids)):
                block_id, num_free = request.block_ids[index], size - max(0, filled - index * size)
                spare[block_id] = min(num_free, spare.get(block_id, num_free))
        return sum(spare.values()) / slots if slots else 0.0

    def _names_of(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """Names of the request's first `num_blocks` blocks, and perhaps of more."""
        names = self._names.get(request.key)
        if names is None:
            salt = request.spec.cache_salt
            names = BlockNames({"cache_salt": salt} if salt else {}, self._pool.block_size)
            self._names[request.key] = names
        return names.of(request, num_blocks)


def _num_meant(request: Request) -> int:
    """Tokens whose KV is in the request's blocks, or on its way there."""
    if request.state is RequestState.RUNNING:  # what one that was preempted had generated is on its way too
        return request.num_tokens
    return max(request.num_computed, request.num_prefill)
