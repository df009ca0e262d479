"""Runs requests on the workers. The life of one request:

1. `generate` checks the request and makes its id; `Placement` picks a prefill worker P and a decode worker D; or D
   alone, which then computes the prompt itself, and what is said of P does not apply. Choices of one prompt are
   requests that wait for each other here (`gateway.gathering`) and go to the same workers.
2. PrefillRequest goes to P and DecodeRequest to D in the same breath, one of each for all choices of a prompt. With
   `max_tokens` 1 only P gets it.
3. Outputs of both are merged by index into one sequence, which waits in a bounded stream for the consumer. P's token is
   held back until D has room for the request (of a long prompt it says so long before, unless it has none).
4. P hands over (no news for the client), D goes on to the end; or P's first token is the last, and D is cancelled.
5. If a worker is lost or fails before that, the request goes to others, with its output so far, and the consumer's
   stream goes on: see `gateway.failover`.
6. However it ends (finished, refused, retries used up, overdue, consumer slow or gone), it ends once: see `Flights`.

One task receives, one ticks. A message that trips a bug of ours costs its sender or its request, not the loop; if
a loop dies nevertheless, `run` raises and `status` says so.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, fields

from gateway.administration import Administrator
from gateway.admission import check_request
from gateway.backend import Backend, ClusterStatus, OverloadedError, TokenDelta, Traits, UnavailableError
from gateway.cluster import Cluster
from gateway.failover import Failover, FailoverSettings
from gateway.flight import Deadlines, Flight
from gateway.flights import Flights
from gateway.gathering import Gathering
from gateway.held_prefixes import BlockChain
from gateway.modes import Mode, ModeRules
from gateway.observer import Audience, DispatchObserver, KvHandover
from gateway.placement import Placement
from gateway.reactions import Departure
from gateway.stream import TokenStream
from gateway.worker import Worker
from gateway.worker_outlet import ControlLink, WorkerOutlet
from kvtransfer.errors import MessageError, SettingsError
from kvtransfer.link_name import worker_of
from kvtransfer.messages import GatewayToWorker, Refused, ResetPrefixCache, WorkerToGateway
from kvtransfer.request_parts import EndReason, RequestOutput, SamplingParams
from kvtransfer.worker_facts import Role
from kvtransfer.worker_lines import WorkerLines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DispatchSettings:
    """Bounds of the requests in flight. Times in seconds; `stream_buffer_tokens` counts per request."""

    max_in_flight: int = 256
    stream_buffer_tokens: int = 4096
    request_timeout_s: float = 600.0
    first_token_timeout_s: float = 300.0
    tick_s: float = 0.25
    failover: FailoverSettings = field(default_factory=FailoverSettings)
    modes: ModeRules = field(default_factory=ModeRules)

    def __post_init__(self) -> None:
        for bound in fields(self):
            value = getattr(self, bound.name)
            if isinstance(value, int | float) and value <= 0:
                raise SettingsError(f"{bound.name} must be positive, not {value}")


class Dispatcher(Backend):
    """The backend behind the HTTP face. Not thread-safe: lives on one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        settings: DispatchSettings,
        observer: DispatchObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._outlet = WorkerOutlet(cluster)
        self._has_reset = False
        self._lines = WorkerLines(logger, cluster.max_workers)
        self._audience = Audience(observer)
        self._flights = Flights(self._outlet.send, self._audience, clock)
        self._placement = Placement(cluster, self._flights, settings.modes, self._drop, clock)
        self.administrator = Administrator(cluster, self._outlet.send, clock)

    # --- towards HTTP --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests dispatched and not over."""
        return len(self._flights)

    @property
    def num_late_outputs(self) -> int:
        """Outputs so far that came for a request or an attempt that was over."""
        return self._flights.num_late_outputs

    @property
    def num_malformed(self) -> int:
        """Messages so far that could not be read."""
        return self._cluster.num_malformed

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All live workers with their last load, for gauges."""
        return self._cluster.workers

    @property
    def capable_ids(self) -> frozenset[str]:
        """Ids of the workers that can take requests now."""
        now = self._clock()
        return frozenset(worker.worker_id for role in Role for worker in self._cluster.capable(role, now))

    def status(self, mode: Mode | None = None) -> ClusterStatus:
        if not self._outlet.is_open:
            return ClusterStatus(ready=False, reasons=("the gateway's control loop does not run",), max_model_len=None)
        return self._cluster.status(self._clock(), (mode or self._settings.modes.default).needs)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        traits: Traits,
        *,
        arrived_at: float,
        note_mode: Callable[[Mode], None] | None = None,
        gathering: Gathering[Flight] | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        gathering = gathering or Gathering(1)
        with gathering.one_fate():
            flight = self._admit(tuple(prompt_token_ids), sampling, traits, arrived_at)
        try:
            await gathering.join(flight, self._launch)
            if note_mode is not None and flight.first_mode is not None:
                note_mode(flight.first_mode)
            while True:
                delta = await flight.stream.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._flights.end(flight)  # no-op unless the consumer leaves early

    def reset_prefix_cache(self) -> None:
        self._has_reset = True
        self._flights.held.forget_all()
        told = [self._outlet.send(worker.worker_id, ResetPrefixCache()) for worker in self.workers]
        if not all(told):
            raise UnavailableError("a worker could not be told")

    def _launch(self, flights: Sequence[Flight]) -> None:
        """The first attempts of requests with one prompt. Raises BackendError."""
        limit = self._settings.max_in_flight
        if self.in_flight + len(flights) > limit:
            raise OverloadedError(f"{self.in_flight} requests are running, and {limit} may; try again later")
        self._placement.launch(flights)

    def _admit(self, prompt: tuple[int, ...], sampling: SamplingParams, traits: Traits, arrived_at: float) -> Flight:
        """A request that can be served. Raises BackendError."""
        status, vocab_size = self.status(traits.mode), self._cluster.vocab_size
        if status.max_model_len is None or vocab_size is None:
            raise UnavailableError("; ".join(status.reasons))
        if sampling.choice_index == 0:  # the others of its prompt differ in that alone, and come after it
            check_request(prompt, sampling, vocab_size=vocab_size, max_model_len=status.max_model_len)
        now, settings = self._clock(), self._settings
        return Flight(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=sampling,
            traits=traits,
            stream=TokenStream(settings.stream_buffer_tokens),
            failover=Failover(settings.failover),
            arrived_at=arrived_at,
            deadlines=Deadlines(now + settings.first_token_timeout_s, now + settings.request_timeout_s),
            max_early=settings.stream_buffer_tokens - 1,  # behind prefill's token, what came early fits the stream
            mode=traits.mode or settings.modes.default,
            chain=BlockChain(traits.cache_salt),
        )

    # --- towards the workers -------------------------------------------------------------------------

    async def run(self, control: ControlLink) -> None:
        """Serves until cancelled; raises if a loop dies. Requests still in flight then fail."""
        self._outlet.open(control)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_loop(control), name="control-receive")
                tasks.create_task(self._tick_loop(), name="control-tick")
        finally:
            self._flights.end_all(UnavailableError("the gateway is stopping"))
            self._outlet.close()

    async def _receive_loop(self, control: ControlLink) -> None:
        while True:
            sender, message = await control.receive()
            self._on_message(sender, message)
            # With a backlog `receive` returns without suspending; consumers and the tick need their turn.
            await asyncio.sleep(0)

    async def _tick_loop(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self._settings.tick_s)

    def tick(self) -> None:
        """What is due at this moment: dead workers, beats, deadlines."""
        now = self._clock()
        tick = self._cluster.tick(now)
        for departure in tick.departed:
            self._on_departure(departure)
        for worker in tick.stalled:
            self._on_worker_change(worker, "has stalled")
        for worker_id in tick.beat_to:
            self._outlet.send(worker_id, self._cluster.beat_to(worker_id))
        self._flights.on_tick(now)
        self._lines.on_tick(now)
        self._placement.place_waiting()

    def _on_message(self, sender: str, message: WorkerToGateway | MessageError) -> None:
        """The exception boundary of one message: a bug in here is the sender's loss."""
        try:
            self._handle(sender, message)
        except Exception:
            if self._lines.may_trace(worker_of(sender), self._clock()):
                logger.exception("worker %r: its message could not be handled", sender)
            if departure := self._cluster.drop_sender(sender, "its message could not be handled"):
                self._on_departure(departure)
        self._placement.place_waiting()

    def _handle(self, sender: str, message: WorkerToGateway | MessageError) -> None:
        reaction = self._cluster.receive(sender, message, self._clock())
        if reaction.reply is not None:  # first: a Welcome comes before all that is numbered from it on
            self._reply(sender, reaction.reply)
        if reaction.departed is not None:
            self._on_departure(reaction.departed)
        if reaction.joined is not None:
            self._lines.say_joined(reaction.joined.worker_id, f"{_name(reaction.joined)} joined", self._clock())
            if self._has_reset:  # it may have been away, with its cache, when the others were told
                self._outlet.send(reaction.joined.worker_id, ResetPrefixCache())
        if reaction.worker is not None:
            for output in reaction.outputs:
                self._on_output(reaction.worker, output)

    def _on_output(self, worker: Worker, output: RequestOutput) -> None:
        if output.end is not None and output.end.reason is EndReason.HANDED_OVER:
            self._audience.tell(lambda observer: observer.on_handover(KvHandover.of(output.events)))
        self._flights.on_output(worker, output)

    def _reply(self, sender: str, reply: GatewayToWorker) -> None:
        if isinstance(reply, Refused):
            self._lines.say_refused(worker_of(sender), reply.reason, self._clock())
        self._outlet.reply(sender, reply)

    def _drop(self, worker_id: str, reason: str) -> None:
        """Gives a worker up, if it is live."""
        if departure := self._cluster.drop(worker_id, reason):
            self._on_departure(departure)

    def _on_departure(self, departure: Departure) -> None:
        self._flights.on_departure(departure.worker, departure.cause)
        self._on_worker_change(departure.worker, f"is gone: {departure.reason}")

    def _on_worker_change(self, worker: Worker, what: str) -> None:
        self._lines.say(logging.WARNING, worker.worker_id, f"{_name(worker)} {what}", self._clock())

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree with each other and with who is live."""
        self._flights.check_integrity(self._cluster.is_live)


def _name(worker: Worker) -> str:
    return f"{worker.role.value} worker {worker.worker_id}"
