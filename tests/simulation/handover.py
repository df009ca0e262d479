"""The two ends of the KV hand-over on simulated threads, over pools of digests."""

from typing import Any

from decode.scheduler import DecodeScheduler
from kvtransfer.codec import RequestKey
from kvtransfer.frames import FrameOptions
from kvtransfer.kv_messages import KvHeader, KvHello
from kvtransfer.layout import KvBody
from kvtransfer.messages import Hello
from kvtransfer.outgoing import Piece
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.receive_machine import ReceiveMachine
from kvtransfer.receiver import KvReceiver
from kvtransfer.send_commands import SenderTiming
from kvtransfer.send_machine import SendMachine
from kvtransfer.sender import KvSender
from prefill.scheduler import PrefillScheduler
from tests.simulation.engine import HashEngine
from tests.simulation.errors import require
from tests.simulation.model import HALF, HashModel
from tests.simulation.threads import SimMailbox, ThreadHandle
from tests.simulation.wires import SimKvDialer, SimKvListener


class HashSource:
    """Stands for `prefill.worker.PoolSource`."""

    def __init__(self, engine: HashEngine, scheduler: PrefillScheduler) -> None:
        self._engine, self._scheduler = engine, scheduler

    def gather(self, key: RequestKey, piece: Piece) -> KvBody:
        job = self._scheduler.find(key)
        require(job is not None, key, "was freed while its KV was being read")
        layers = range(piece.layer, piece.layer + piece.num_layers)
        cache = self._engine.kv_cache
        entries = [entry for layer in layers for entry in cache.read(job, layer, piece.start, piece.stop)]
        k, v = b"".join(entry[:HALF] for entry in entries), b"".join(entry[HALF:] for entry in entries)
        return KvBody(memoryview(k), memoryview(v))


class HashSink:
    """Stands for `decode.worker.PoolSink`. Knows what should come and how much has, and what can be read."""

    def __init__(self, engine: HashEngine, scheduler: DecodeScheduler, model: HashModel) -> None:
        self._engine, self._scheduler, self._model = engine, scheduler, model
        self.spliced_bytes: dict[RequestKey, int] = {}
        self.finished: set[RequestKey] = set()

    def splice(self, key: RequestKey, header: KvHeader, body: KvBody) -> None:
        job = self._scheduler.find(key)
        require(job is not None, key, "was freed while its KV was being written")
        cuts = range(0, len(body.k), HALF)
        entries = [bytes(body.k[at : at + HALF]) + bytes(body.v[at : at + HALF]) for at in cuts]
        digests = self._model.digests(job.token_slice(0, header.stop))[header.start :]
        expected = [self._model.entry(layer, digest) for layer in header.layers for digest in digests]
        require(entries == expected, key, "gets spoilt KV")
        for index, layer in enumerate(header.layers):
            self._engine.kv_cache.write(job, layer, header.start, entries[index * len(digests) :][: len(digests)])
        self.spliced_bytes[key] = self.spliced_bytes.get(key, 0) + len(body.k) + len(body.v)

    def finish(self, key: RequestKey) -> None:
        self.finished.add(key)


class SimSender(KvSender):
    """The real sender's turns and commands; its socket, mailbox and thread are given to it."""

    def __init__(
        self,
        hello: KvHello,
        source: HashSource,
        events: SimMailbox,
        timing: SenderTiming,
        dialer: SimKvDialer,
        thread: ThreadHandle,
        options: FrameOptions,
    ) -> None:
        self._idle_wait = timing.keepalive / 4
        self._commands: Any = SimMailbox(thread.wake)
        self._dialer: Any = dialer
        self._emulated = None
        self._events: Any = events
        self._news = []
        self._machine = SendMachine(hello, source, dialer, self._news.append, timing, options)
        self._thread: Any = thread
        self._stopping = False

    @property
    def machine(self) -> SendMachine:
        return self._machine

    def turn(self, now: float) -> float:
        """Seconds to the next one."""
        more = self._turn(self._commands.drain(), now)
        self._dialer.end_turn()
        return 0.0 if more else self._idle_wait


class SimReceiver(KvReceiver):
    """The real receiver's turns and commands, likewise."""

    def __init__(
        self,
        listener: SimKvListener,
        hello: Hello,
        sink: HashSink,
        limits: ReceiverLimits,
        events: SimMailbox,
        thread: ThreadHandle,
    ) -> None:
        self._listener: Any = listener
        self._commands: Any = SimMailbox(thread.wake)
        identity = (hello.fingerprint, hello.layout)
        self._events: Any = events
        self._news = []
        self._machine = ReceiveMachine(identity, hello.generation, sink, limits, listener.send, self._news.append)
        self._thread: Any = thread
        self._stopping = False

    @property
    def machine(self) -> ReceiveMachine:
        return self._machine

    def turn(self, now: float) -> float:
        """Seconds to the next one."""
        self._turn(self._commands.drain(), now)
        self._listener.end_turn()
        return 0.0 if self._listener.has_unread else self._machine.sweep_interval
