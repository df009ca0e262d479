"""Requests that take a block when they need one: who takes part in a step, and who gives its blocks when none is free.

Knows no torch, socket or clock. A step:

    |<- one token of each that has its KV ->|<- chunks of those that have not, in order ->|
                                            |<----------- at most a given number -------->|  engine/chunk_budget.py

When no block is free, the request that stands last in the order gives its own to the one that needs one (PREEMPTED). As
soon as there is room it comes back, before all that is new. With a swap space that has room, its KV has gone to the
host's memory meanwhile, and what the prefix cache does not have any more is copied back; else what the pool has lost is
computed again.

The first in the order never gives blocks away, so it always gets on, and then the next one is the first. One that needs
a block and has nobody behind it keeps its own and sits steps out: whoever has the rest is done some day.

Choices of one prompt are computed as one request up to their first tokens. Then they fork: each is a request like any
other, and all own the prompt's blocks. The last of these, if it is not full, is copied when one of them writes to it
first (copy on write); who owns it alone by then writes in place:

    leader     | b0 | b1 | b2 p p . . |                  p: the prompt's last tokens
    fork       | b0 | b1 | b2 p p . . |   owned by all
    follower   | b0 | b1 | b7 p p x . |   b7: a copy of b2, with its own token
"""

import bisect
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import structs

from engine.block_pool import BlockPool, blocks_for
from engine.chunk_budget import share_in_order
from engine.queue_rules import QueueRules
from engine.request import Outgoing, Request, RequestState, ScheduledRow, with_followers
from engine.request_book import Command, Limits, RequestBook
from engine.swap_space import SwapSpace
from kvtransfer.request_parts import LifetimeEvent, RequestEnd, RequestOutput
from kvtransfer.worker_facts import Load, SwapLoad


@dataclass(eq=False)
class GrowingJob(Request):
    """A request that generates. `num_reported`: output tokens that its owner was told of."""

    num_reported: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_reported = self.num_resumed

    @property
    def is_local(self) -> bool:
        """Whether its prompt is computed here, too."""
        return True


Grower = TypeVar("Grower", bound=GrowingJob)


class GrowingBook(RequestBook[Grower, Command, Limits]):
    """A RequestBook whose running requests grow, and lose their blocks to each other."""

    def __init__(
        self,
        pool: BlockPool,
        rules: QueueRules,
        limits: Limits,
        eos_token_ids: AbstractSet[int],
        swap: SwapSpace | None = None,
    ) -> None:
        """`swap`: where preempted requests leave their KV; without it all of them are computed again."""
        super().__init__(pool, rules, limits, eos_token_ids)
        self._swap = swap
        self._preempted: list[Grower] = []  # in the order of their places
        self._copies: dict[int, int] = {}
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + sum(request.num_members for request in self._preempted)

    def load(self) -> Load:
        swap = SwapLoad() if self._swap is None else self._swap.load()
        return structs.replace(super().load(), num_preemptions=self._num_preemptions, swap=swap)

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._swap is not None:
            self._swap.check_integrity(request.key for request in self._preempted)

    def take_copies(self) -> dict[int, int]:
        """Blocks to be filled before the scheduled step runs, each with the block whose contents it gets: all of these
        are read before any is written."""
        copies, self._copies = self._copies, {}
        return copies

    # --- rows

    def _step_rows(self, budget: int, max_partial: int, now: float) -> list[ScheduledRow]:
        """The next step's rows, of what has been admitted; `budget` and `max_partial` as in `_chunk_rows`."""
        tokens = self._token_rows()  # first: they may take blocks from those that would get chunks
        rows = with_followers([*tokens, *self._chunk_rows(budget, max_partial)])
        for row in rows:
            row.request.record(LifetimeEvent.RUNNING, now)
        return rows

    def _token_rows(self) -> list[ScheduledRow]:
        """One token of each request that has the KV of all others, and a block for this one."""
        rows = []
        for request in list(self._running):
            if request.state is RequestState.RUNNING and request.num_uncomputed == 1 and self._grow(request):
                rows.append(ScheduledRow(request, request.num_computed, 1))
        return rows

    def _chunk_rows(self, budget: int, max_partial: int) -> list[ScheduledRow]:
        """`budget` tokens at most of requests whose KV is computed here, at most `max_partial` of them cut short; they
        have all blocks they need."""
        requests = [request for request in self._running if request.num_uncomputed > 1]
        counts = share_in_order([request.num_uncomputed for request in requests], budget, max_partial)
        pairs = zip(requests, counts, strict=True)
        return [ScheduledRow(request, request.num_computed, count) for request, count in pairs if count]

    # --- blocks

    def _fits(self, request: Grower, num_tokens: int, cached: list[int]) -> bool:
        """Whether `num_tokens` fit with one block to spare for each that holds blocks, and for each follower: they
        grow, and who comes in without that is the first to lose its own to them. Alone, all of the pool will do."""
        size = self._pool.block_size
        wanted = blocks_for(num_tokens, size) + self.num_running + request.num_members - 1
        return self._pool.can_fit(min(wanted, self._pool.num_blocks) * size, shared=cached)

    def _grow(self, request: Grower) -> bool:
        """Whether the request has a block for its next token now; one behind it in the order may have lost its own."""
        while not self._may_write(request):
            if self._pool.num_free:
                self._give_block(request)
            elif self._running[-1] is request:
                return False
            else:
                self._preempt(self._running[-1])
        return True

    def _may_write(self, request: Grower) -> bool:
        """Whether its next token's KV has a place that is nobody else's."""
        index = (request.num_tokens - 1) // self._pool.block_size
        return index < len(request.block_ids) and not self._pool.is_shared(request.block_ids[index])

    def _give_block(self, request: Grower) -> None:
        """One more at the end, or a copy of the last one in its place, if others have that too."""
        [fresh] = self._pool.allocate(1, owner=request.key)
        if request.num_tokens > len(request.block_ids) * self._pool.block_size:
            request.block_ids.append(fresh)
            return
        shared = request.block_ids[-1]
        self._copies[fresh] = shared
        request.block_ids[-1] = fresh
        self._pool.free([shared], owner=request.key)

    def _fork(self, request: Grower) -> list[Grower]:
        """The first tokens are drawn: each follower becomes a request of its own on the leader's blocks."""
        followers = self._followers_of(request)
        for follower in followers:
            self._blocks.fork(request, follower)
            follower.part()
            self._run(follower)
        return followers

    def _preempt(self, request: Grower) -> None:
        unfilled = self._copies.keys() & request.block_ids  # who has a row in this step stands before all victims
        assert not unfilled, f"{request.key} loses blocks {unfilled}, which are still to be filled for it"
        self._running.remove(request)
        if self._swap is not None and request.num_computed:
            self._moves += self._swap.save(request.key, request.block_ids, request.num_computed)
        self._blocks.give_back(request)
        request.num_computed = 0
        request.move(RequestState.PREEMPTED)
        bisect.insort(self._preempted, request, key=self._place)
        self._num_preemptions += 1

    def _readmit(self) -> None:
        """Lets those come back that there is room for, in order."""
        while self._preempted:
            request = self._preempted[0]
            cached = self._blocks.find_cached(request, request.num_tokens - 1)
            if not self._fits(request, request.num_tokens, cached):
                return
            self._preempted.pop(0)
            self._blocks.take(request, request.num_tokens, cached)
            self._restore(request)
            self._run(request)

    def _restore(self, request: Grower) -> None:
        """Brings back what the swap space has of a request, behind what was found in the prefix cache."""
        if self._swap is not None:
            num_tokens, moves = self._swap.restore(request.key, request.block_ids, request.num_computed)
            self._moves += moves
            self._blocks.note_computed(request, num_tokens)

    # --- ends, word

    def _say(self, request: Grower, end: RequestEnd | None) -> None:
        """Tells the owner what is new."""
        start, request.num_reported = request.num_reported, len(request.output_token_ids)
        token_ids = tuple(request.output_token_ids[start:])
        logprobs, request.logprobs = tuple(request.logprobs), []
        output = RequestOutput(
            request_id=request.spec.request_id,
            attempt=request.spec.attempt,
            start=start,
            token_ids=token_ids,
            end=end,
            num_cached=request.num_cached if request.is_local else 0,
            events=request.readings() if end is not None or not token_ids else {},
            logprobs=logprobs,
        )
        self._outputs.append(Outgoing(request.gateway, output))

    def _unlist(self, request: Grower) -> None:
        if request.state is RequestState.PREEMPTED:
            self._preempted.remove(request)
        super()._unlist(request)

    def _release(self, request: Grower, now: float) -> None:
        if self._swap is not None:
            self._swap.drop(request.key)
        super()._release(request, now)
