"""A dispatcher over a fake control channel: tests speak as the workers, and read what they were told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgspec

from gateway.backend import BackendError, TokenDelta, Traits
from gateway.cluster import Cluster, ClusterSettings
from gateway.dispatch import Dispatcher, DispatchSettings
from gateway.failover import RetryReason
from gateway.gathering import Gathering
from gateway.modes import Mode
from gateway.observer import KvHandover, RequestOutcome
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.link_name import worker_of
from kvtransfer.messages import GatewayBeat, Heartbeat, Hello, RequestMessage, StepOutput, Welcome
from kvtransfer.request_parts import EndReason, LifetimeEvent, RequestEnd, RequestOutput, RequestSpec, SamplingParams
from kvtransfer.worker_facts import Fingerprint, KvLayout, Limits, Load, Role

EPOCH = "epoch-1"
RESERVED = {LifetimeEvent.RECEIVED: 0.0, LifetimeEvent.RESERVED: 0.0}
FINGERPRINT = Fingerprint(architecture="Llama", config="c0", weights="w0", dtype="float32", vocab_size=100)
LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=64, dtype="float32", block_size=16)
LIMITS = Limits(max_model_len=1000, max_num_seqs=8, kv_tokens=2000)


def hello(worker_id: str = "prefill-0", generation: str = "g1", **changes) -> Hello:
    """A Hello that fits; the role follows from the id."""
    role = Role.PREFILL if worker_id.startswith("prefill") else Role.DECODE
    fields = {
        "protocol": PROTOCOL_VERSION,
        "role": role,
        "worker_id": worker_id,
        "generation": generation,
        "fingerprint": FINGERPRINT,
        "layout": LAYOUT,
        "limits": LIMITS,
        "kv_endpoint": None if role is Role.PREFILL else f"tcp://127.0.0.1:{worker_id[-1]}",
    }
    return Hello(**(fields | changes))


def link(worker_id: str, generation: str = "g1") -> str:
    """Name of the connection of a worker's start."""
    return f"{worker_id}/{generation}/nonce"


def link_for(worker_id: str, message, generation: str = "g1") -> str:
    """Name of the connection that a worker would say this on; for what can't be read, that of `generation`."""
    return link(worker_id, getattr(message, "generation", generation))


def beat(
    generation: str = "g1",
    progress: int = 1,
    running: int = 0,
    waiting: int = 0,
    usage: float = 0.0,
    sequence: int = 0,
    draining: bool = False,
) -> Heartbeat:
    load = Load(num_running=running, num_waiting=waiting, kv_usage=usage)
    return Heartbeat(generation, sequence, progress, load, draining)


def step(*outputs: RequestOutput, generation: str = "g1", sequence: int = 1) -> StepOutput:
    return StepOutput(generation, sequence, outputs)


def sampling(max_tokens: int = 8, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, **changes)


NO_TRAITS = Traits()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeControl:
    """In place of the ROUTER: an inbox to speak into, and a list of what was sent. Both can be made to fail.

    What has a number must have the right one; it is kept without. Connections are kept by their workers' ids.
    """

    def __init__(self) -> None:
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.sent: list = []
        self.named: list = []  # the same with the full names of connections, and numbers
        self.unreachable: set[str] = set()
        self.num_sent: dict[str, int] = {}  # since Welcome

    async def receive(self):
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    def send(self, name, message) -> bool:
        worker_id = worker_of(name)
        if worker_id in self.unreachable:
            return False
        self.named.append((name, message))
        self.sent.append((worker_id, self._without_number(worker_id, message)))
        return True

    def _without_number(self, worker_id, message):
        if isinstance(message, Welcome):
            self.num_sent[worker_id] = 0
        if isinstance(message, GatewayBeat):
            assert message.sequence == self.num_sent[worker_id]
        if not isinstance(message, RequestMessage):
            return message
        self.num_sent[worker_id] += 1
        assert message.sequence == self.num_sent[worker_id]
        return msgspec.structs.replace(message, sequence=0)

    def to(self, worker_id: str, kind: type) -> list:
        """What was sent to a worker, of one kind."""
        return [message for target, message in self.sent if target == worker_id and isinstance(message, kind)]


class Recorder:
    """Keeps what a metrics observer is told."""

    def __init__(self) -> None:
        self.outcomes: list[RequestOutcome] = []
        self.retries: list[RetryReason] = []
        self.handovers: list[KvHandover] = []

    def on_request_end(self, outcome) -> None:
        self.outcomes.append(outcome)

    def on_retry(self, reason) -> None:
        self.retries.append(reason)

    def on_handover(self, handover) -> None:
        self.handovers.append(handover)


class Client:
    """Consumes one `generate`; reads only while `reading` is set."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompt: tuple[int, ...],
        params: SamplingParams,
        arrived_at: float,
        traits: Traits = NO_TRAITS,
        mode: Mode | None = Mode.DISAGGREGATED,
        gathering: Gathering | None = None,
    ) -> None:
        self.mode: Mode | None = None  # that of the first attempt
        self.tokens: list[int] = []
        self.deltas: list[TokenDelta] = []
        self.finish: EndReason | None = None
        self.error: BackendError | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        traits = replace(traits, mode=traits.mode or mode)
        self._stream = dispatcher.generate(
            prompt, params, traits, arrived_at=arrived_at, note_mode=self._note_mode, gathering=gathering
        )
        self.task = asyncio.get_running_loop().create_task(self._consume())

    def _note_mode(self, mode: Mode) -> None:
        assert self.mode is None, "said twice"
        self.mode = mode

    async def _consume(self) -> None:
        try:
            async for delta in self._stream:
                assert self.finish is None, "a delta came after the last one"
                self.deltas.append(delta)
                self.tokens += delta.token_ids
                self.finish = delta.finish
                await self.reading.wait()
        except BackendError as error:
            self.error = error
        finally:
            await self._stream.aclose()

    async def leave(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class World:
    """One dispatcher that runs, on a clock that stands still until it is moved."""

    def __init__(self, cluster: ClusterSettings, settings: DispatchSettings) -> None:
        self.clock = Clock()
        self.control = FakeControl()
        self.recorder = Recorder()
        self.cluster = Cluster(EPOCH, cluster)
        self.dispatcher = Dispatcher(self.cluster, settings, self.recorder, self.clock)
        self.said: dict[str, tuple[str, int]] = {}  # worker id to generation and number of its last StepOutput

    async def join(self, *worker_ids: str, generation: str = "g1") -> None:
        for worker_id in worker_ids:
            await self.hear(worker_id, hello(worker_id, generation))
            await self.hear(worker_id, beat(generation))

    async def hear(self, worker_id: str, message) -> None:
        """A worker that counts right speaks."""
        name = link_for(worker_id, message, *self.said.get(worker_id, ())[:1])
        self.control.inbox.put_nowait((name, self._numbered(worker_id, message)))
        await self.settle()

    def _numbered(self, worker_id: str, message):
        if isinstance(message, Hello):
            self.said[worker_id] = (message.generation, 0)
        if not isinstance(message, Heartbeat | StepOutput):
            return message
        generation, number = self.said[worker_id]
        if generation != message.generation:
            return message
        number += isinstance(message, StepOutput)
        self.said[worker_id] = (generation, number)
        return msgspec.structs.replace(message, sequence=number)

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def ask(
        self,
        prompt=(1, 2, 3),
        max_tokens: int = 8,
        traits: Traits = NO_TRAITS,
        mode: Mode | None = Mode.DISAGGREGATED,
        **changes,
    ) -> Client:
        """`mode` None: that of the settings."""
        params = sampling(max_tokens, **changes)
        client = Client(self.dispatcher, tuple(prompt), params, self.clock.now, traits, mode)
        await self.settle()
        return client

    def begin(self, num_choices: int, max_tokens: int = 8, mode: Mode | None = Mode.DISAGGREGATED) -> list[Client]:
        """Several choices of a prompt; nothing has happened yet."""
        gathering: Gathering = Gathering(num_choices)
        return [
            Client(
                self.dispatcher,
                (1, 2, 3),
                sampling(max_tokens, choice_index=index),
                self.clock.now,
                mode=mode,
                gathering=gathering,
            )
            for index in range(num_choices)
        ]

    async def reserve(self, spec: RequestSpec, worker_id: str = "decode-0", generation: str = "g1") -> None:
        """Decode has room for the request: it can't turn it away any more."""
        await self.say(worker_id, spec, len(spec.output_token_ids), generation=generation, events=RESERVED)

    def spec(self, worker_id: str, kind: type) -> RequestSpec:
        """The request that a worker was given last."""
        return self.control.to(worker_id, kind)[-1].request

    async def say(
        self, worker_id, spec, start, tokens=(), end=None, message="", generation="g1", events=None, **told
    ) -> None:
        """A worker's StepOutput with one output."""
        ending = None if end is None else RequestEnd(end, message)
        output = RequestOutput(spec.request_id, spec.attempt, start, tuple(tokens), ending, events or {}, **told)
        await self.hear(worker_id, step(output, generation=generation))

    async def pass_time(self, seconds: float, alive: dict[str, str] | None = None) -> None:
        """Moves the clock in small steps, each with a tick; workers in `alive` (id: generation) beat meanwhile."""
        stop = self.clock.now + seconds
        while self.clock.now < stop:
            self.clock.now = min(stop, self.clock.now + 0.5)
            for worker_id, generation in (alive or {}).items():
                await self.hear(worker_id, beat(generation, progress=int(self.clock.now * 2)))
            self.dispatcher.tick()
        await self.settle()

    def assert_empty(self) -> None:
        self.dispatcher.check_integrity()
        assert self.dispatcher.in_flight == 0


@asynccontextmanager
async def world(
    *worker_ids: str, cluster: ClusterSettings | None = None, settings: DispatchSettings | None = None
) -> AsyncIterator[World]:
    """A running dispatcher with these workers. Ticks only when told, unless `settings` says otherwise."""
    it = World(cluster or ClusterSettings(), settings or DispatchSettings(tick_s=3600))
    task = asyncio.get_running_loop().create_task(it.dispatcher.run(it.control))
    await it.settle()
    await it.join(*worker_ids)
    try:
        yield it
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
