"""Which prompt tokens go into the next step. Knows no torch, socket or clock: time comes in as an argument.

The life of a request here:

1. `add`: checked by the worker, queued (WAITING).
2. Admitted in the order of the queue when its whole prompt, and the output of earlier attempts, fit the pool (RUNNING),
   and offered to decode, which reserves meanwhile. A full pool stops admission, and this is the back-pressure: blocks
   come back as decode workers take KV over. Nothing is offered before it has its blocks here: decode would keep room
   for it that others, whose blocks it waits for, can't have.
3. What the pool still holds of its prompt from an earlier request is shared; the rest, at least its last token, is
   computed in chunks. The first token goes to the gateway, and behind the KV to decode (HANDING_OVER).
   Without a target, or if the first token is the last, the request ends here. Further choices of the prompt follow the
   one that leads them: the prompt is computed and shipped once, and each draws a first token of its own.
4. `transfer_ended`: decode has everything; blocks are freed (ENDED). Or decode is silent: the request has failed.

A step's token budget is shared so that nobody starves and short prompts do not wait for long ones:

    |<- a quarter for the oldest ->|<- the rest: shortest remaining prompt first ------------>|
    0                                                                         max_num_batched_tokens

A prompt's first token comes at the end of the step that completes it, so such a step is filled only up to the half
with prompts that are longer than a whole step.

With a limit on prompts that are begun and not done, one more begins only in a step that completes it, and the share of
the oldest goes to the oldest that is begun, until a place is free: the oldest of all is the next to take it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.request import Outgoing, Request, RequestState, ScheduledRow, with_followers
from engine.request_book import RequestBook
from kvtransfer.codec import RequestKey
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded, TransferOutcome, TransferTimes
from kvtransfer.request_parts import Drawn, EndReason, LifetimeEvent, RequestEnd, RequestOutput, TokenLogprob

OLDEST_SHARE = 4
"""The oldest request gets at least 1/OLDEST_SHARE of each step's budget."""
COMPLETING_SHARE = 2
"""A step that completes a prompt is filled with parts of long ones up to 1/COMPLETING_SHARE of the budget. Smaller
steps would give first tokens sooner, but leave a GPU idle."""


@dataclass(frozen=True)
class PrefillLimits:
    """Tokens a step, requests computed at once, tokens a request; seconds to wait for room here; prompts that are begun
    and not done at once (None: as many as there are)."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    queue_timeout: float
    max_num_partial_prefills: int | None = None


@dataclass(eq=False, kw_only=True)
class PrefillJob(Request):
    """A request with where its KV goes (None: nowhere)."""

    target: DecodeTarget | None


@dataclass(frozen=True)
class OpenTransfer:
    """Offer the request's KV to its target."""

    request: PrefillJob


@dataclass(frozen=True)
class SendFirstToken:
    """The prompt is computed: this token follows its KV, and those of the other choices, by request id."""

    key: RequestKey
    token_id: int
    logprob: TokenLogprob | None = None
    siblings: Mapping[str, Drawn] = field(default_factory=dict)


@dataclass(frozen=True)
class AbortTransfer:
    """Stop shipping; answered by `transfer_ended`. `tell_peer`: decode can't know otherwise that no KV will come.

    A request that ends well here, or is cancelled, is cancelled on decode by the gateway: a word from us might reach
    the gateway through decode before our own and pass for a failure.
    """

    key: RequestKey
    reason: str
    tell_peer: bool


TransferCommand = OpenTransfer | SendFirstToken | AbortTransfer


class PrefillScheduler(RequestBook[PrefillJob, TransferCommand, PrefillLimits]):
    """Owns all requests of a prefill worker. What it decides is drained by `take_outputs` and `take_commands`."""

    def transfer_ended(self, event: TransferEnded, now: float) -> None:
        """The sender will not touch the request's blocks again."""
        request = self._requests.get(event.key)
        if request is None:
            return
        request.lent = False
        if event.times is not None:
            teller = next((member for member in (request, *request.followers) if not member.is_over), request)
            _record_times(teller, event.times)
        if request.state is RequestState.CLOSING:
            self._release(request, now)
        elif request.state is RequestState.HANDING_OVER and event.outcome is TransferOutcome.DONE:
            self._end(request, EndReason.HANDED_OVER, now)
        else:
            self._end(
                request, EndReason.FAILED, now, f"the KV transfer ended early: {event.reason or event.outcome.value}"
            )

    def expire(self, now: float) -> None:
        """Ends requests that have waited too long for room. How long decode may take, the sender knows: it hears it."""
        for request in list(self._waiting):
            if now - request.events[LifetimeEvent.RECEIVED] > self._limits.queue_timeout:
                message = f"no room in the KV pool for {self._limits.queue_timeout:g} s"
                self._end(request, EndReason.OVERLOADED, now, message)

    # --- the step

    def schedule(self, now: float) -> list[ScheduledRow]:
        """The next step's rows, at most `max_num_batched_tokens` tokens in all; empty if there is nothing to do."""
        self._admit()
        limits = self._limits
        shares = share_budget(self._running, limits.max_num_batched_tokens, limits.max_num_partial_prefills)
        rows = with_followers(shares)
        for row in rows:
            row.request.record(LifetimeEvent.SCHEDULED, now)
        return rows

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if sum(job.num_members for job in (*self._running, request)) > self._limits.max_num_seqs:
                return
            cached = self._blocks.find_cached(request, request.num_prefill - 1)
            if not self._pool.can_fit(request.num_prefill, shared=cached):
                return
            self._waiting.pop(0)
            self._blocks.take_first(request, request.num_prefill, cached)
            self._run(request)
            if request.target is not None:
                request.lent = True
                self._commands.append(OpenTransfer(request))

    def _sampled(self, request: PrefillJob, drawn: Mapping[RequestKey, Drawn], now: float) -> None:
        """The first new tokens, and the only ones here. Each choice says its own; what any of them needs of it, decode
        hears behind the KV."""
        followers = self._followers_of(request)
        for member in (request, *followers):
            if not member.is_over:
                self._first_token(member, drawn[member.key], now)
        if request.state is not RequestState.RUNNING:
            return  # it has ended, and all others with it
        self._running.remove(request)
        request.move(RequestState.HANDING_OVER)
        own, siblings = drawn[request.key], {follower.spec.request_id: drawn[follower.key] for follower in followers}
        self._commands.append(SendFirstToken(request.key, own.token_id, own.logprob, siblings))

    def _first_token(self, request: PrefillJob, drawn: Drawn, now: float) -> None:
        request.append(drawn)
        request.record(LifetimeEvent.FIRST_TOKEN, now)
        reason = self._finish_reason(request)
        if reason is None and request.target is None:
            reason = EndReason.LENGTH  # prefill alone goes no further
        if reason is None:
            self._say(request, None)
        else:
            self._end_alone(request, reason, now)

    # --- end, word

    def _stop_transfer(self, request: PrefillJob, reason: EndReason, message: str) -> TransferCommand:
        return AbortTransfer(request.key, message or reason.value, tell_peer=reason.is_error)

    def _say(self, request: PrefillJob, end: RequestEnd | None) -> None:
        """Tells the gateway what is new: the first token (repeated with the end, which does no harm)."""
        output = RequestOutput(
            request_id=request.spec.request_id,
            attempt=request.spec.attempt,
            start=request.num_resumed,
            token_ids=tuple(request.output_token_ids[request.num_resumed :]),
            end=end,
            num_cached=request.num_cached,
            events=request.readings(),
            logprobs=tuple(request.logprobs),
        )
        self._outputs.append(Outgoing(request.gateway, output))


def _record_times(request: Request, times: TransferTimes) -> None:
    request.record(LifetimeEvent.KV_READY, times.ready_at)
    request.record(LifetimeEvent.KV_TAKEN, times.taken_at)
    if times.started_at is not None:
        request.record(LifetimeEvent.KV_STARTED, times.started_at)


def share_budget(running: Sequence[Request], budget: int, max_partial: int | None = None) -> list[ScheduledRow]:
    """Splits `budget` tokens over requests (oldest first): a share for the oldest, then shortest remaining first. At
    most `max_partial` of them are begun and not done afterwards."""
    if not running:
        return []
    limit = len(running) if max_partial is None else max_partial
    partial = {request.key for request in running if request.num_computed > request.num_cached}
    oldest = running[0] if len(partial) < limit else next(request for request in running if request.key in partial)
    reserved = min(oldest.num_uncomputed, max(1, budget // OLDEST_SHARE))
    counts = {oldest.key: reserved}
    partial.add(oldest.key)
    left, completes = budget - reserved, False
    for request in sorted(running, key=lambda request: request.num_uncomputed):
        missing = request.num_uncomputed - counts.get(request.key, 0)
        if completes and request.num_uncomputed > budget:
            left = min(left, max(0, budget // COMPLETING_SHARE - (budget - left)))
        count = min(missing, left)
        if count == missing:
            completes = True
            partial.discard(request.key)
        elif request.key not in partial and len(partial) >= limit:
            continue
        elif count:
            partial.add(request.key)
        counts[request.key] = counts.get(request.key, 0) + count
        left -= count
    return [
        ScheduledRow(request, request.num_computed, counts[request.key])
        for request in running
        if counts.get(request.key)
    ]
