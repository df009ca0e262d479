"""A worker process: the real worker, role, scheduler, links and hand-over on simulated threads and sockets.

Each worker has three threads (engine, control, kv). A step of the engine gives the two others their turn between two
layers now and then, so that KV is shipped and spliced, and events come, in the middle of a step.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from decode.config import ROOM_SHARE
from decode.scheduler import DecodeLimits, DecodeScheduler
from decode.worker import DecodeRole
from engine.swap_space import SwapSpace
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.control import GatewayLinks, LinkTiming
from kvtransfer.frames import TOGETHER_BYTES, FrameOptions
from kvtransfer.kv_messages import KvHello
from kvtransfer.link_name import new_link_name
from kvtransfer.messages import Hello
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.send_commands import SenderTiming
from kvtransfer.worker import IDLE_WAIT_S, StopRequested, Worker
from kvtransfer.worker_facts import Limits, Role
from prefill.scheduler import PrefillLimits, PrefillScheduler
from prefill.worker import PrefillRole
from tests.simulation.config import WorldConfig
from tests.simulation.engine import make_engine
from tests.simulation.handover import HashSink, HashSource, SimReceiver, SimSender
from tests.simulation.model import HashModel
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.threads import SimMailbox, Thread, ThreadHandle
from tests.simulation.wires import SimControlWire, SimKvDialer, SimKvListener

KV_TURN_A_LAYER = 0.3
CONTROL_TURN_A_LAYER = 0.1
LEFT_RUNNING_S = 3600.0


class HandoverWatch(Protocol):
    """Who checks what decode says to prefill."""

    def decode_says(self, node: "DecodeNode", message: Any) -> None: ...


class WorkerWatch(Protocol):
    """Who checks what a worker does."""

    def after_turn(self, node: "WorkerNode") -> None: ...

    def after_kv_turn(self, node: "WorkerNode") -> None: ...

    def worker_takes(self, node: "WorkerNode", event: Any) -> None: ...

    def worker_says(self, node: "WorkerNode", gateway: str, message: Any) -> None: ...

    @property
    def handover(self) -> "HandoverWatch": ...


class WorkerNode(Process, abc.ABC):
    """One life of one worker. `gateways` are the endpoints it dials; `exit_code` is set once it has ended by itself."""

    role_kind: Role

    def __init__(
        self,
        config: WorldConfig,
        network: Network,
        model: HashModel,
        watch: WorkerWatch,
        gateways: Sequence[str],
        host: str,
        life: int,
    ) -> None:
        super().__init__(network.timeline, host, life)
        self.config, self.network, self.model, self.watch = config, network, model, watch
        self.exit_code: int | None = None
        self.engine_thread = self._thread(self._engine_turn)
        self.control_thread = self._thread(self._control_turn)
        self.kv_thread = self._thread(self._kv_turn)
        self.inbox = SimMailbox(self.engine_thread.wake, lambda event: watch.worker_takes(self, event))
        num_blocks, block_size = self.pool_size()
        self.engine = make_engine(
            model, num_blocks, block_size, config.max_model_len, self._elsewhere, config.swap_blocks
        )
        self.hello = self._introduce()
        role = self._make_role()
        self.links = self._make_links(gateways)
        self.worker = Worker(role, self.links, self.inbox, config.shutdown_timeout, self.timeline.clock)
        self.role = role

    def start(self) -> None:
        self.note("starts")
        self.role.start()
        self.links.start()
        self.engine_thread.wake()

    def stop(self) -> None:
        """As by SIGTERM."""
        self.note("is told to stop")
        self.inbox.put(StopRequested())

    def die(self) -> None:
        super().die()
        self.network.deaths.setdefault((self.host, self.hello.generation), self.timeline.now)
        self.wire.close()
        self._close_kv()

    @abc.abstractmethod
    def pool_size(self) -> tuple[int, int]:
        """Blocks, and tokens in one."""

    @abc.abstractmethod
    def _make_role(self) -> Any: ...

    @abc.abstractmethod
    def _kv_turn(self) -> float: ...

    @abc.abstractmethod
    def _close_kv(self) -> None: ...

    @property
    def kv_endpoint(self) -> str | None:
        return None

    def _introduce(self) -> Hello:
        config = self.config
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self.role_kind,
            worker_id=self.host,
            generation=f"g{self.life}",
            fingerprint=self.engine.fingerprint,
            layout=self.engine.layout,
            limits=Limits(config.max_model_len, config.max_num_seqs, self.engine.kv_cache.num_tokens),
            kv_endpoint=self.kv_endpoint,
        )

    def _make_links(self, gateways: Sequence[str]) -> GatewayLinks:
        links = GatewayLinks(
            self.hello,
            gateways,
            LinkTiming(self.config.beat_interval, self.config.gateway_dead_after),
            self.inbox,
            self.config.max_waiting,
            dial=self._dial_gateways,
            _outbox=SimMailbox(self.control_thread.wake),
        )
        links._thread = ThreadHandle(self.control_thread)
        return links

    def _dial_gateways(self, name: str, gateways: Sequence[str]) -> SimControlWire:
        self.wire = SimControlWire(self.network, self.host, name, gateways, self.control_thread.wake)
        self.wire.on_send = lambda gateway, message: self.watch.worker_says(self, gateway, message)
        return self.wire

    def _thread(self, turn: Callable[[], float]) -> Thread:
        return Thread(self.timeline, turn, self.lag, self.ready_at)

    def _engine_turn(self) -> float:
        if self.worker._is_over(self.timeline.now):
            return self._end()
        self.worker.turn()
        self.watch.after_turn(self)
        return self.config.step_s * self.slowness if self.worker._busy else IDLE_WAIT_S

    def _end(self) -> float:
        """The process leaves by itself: says so, and is gone."""
        self.exit_code = self.worker._shut_down()
        self.note(f"ends with {self.exit_code}")
        self.control_thread.run_now()
        self.timeline.after(self.lag(), self.die)
        return LEFT_RUNNING_S

    def _control_turn(self) -> float:
        self.links.turn(self.timeline.now)
        return self.config.beat_interval / 4

    def _elsewhere(self) -> None:
        if self.rng.random() < KV_TURN_A_LAYER:
            self.kv_thread.run_now()
            self.kv_thread.wake()
        if self.rng.random() < CONTROL_TURN_A_LAYER:
            self.control_thread.run_now()


class PrefillNode(WorkerNode):
    role_kind = Role.PREFILL

    def pool_size(self) -> tuple[int, int]:
        return self.config.prefill_blocks, self.config.prefill_block_size

    def _make_role(self) -> PrefillRole:
        config, hello = self.config, self.hello
        limits = PrefillLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            queue_timeout=config.queue_timeout,
        )
        self.scheduler = PrefillScheduler(self.engine.pool, config.queue_rules, limits, self.engine.eos_token_ids)
        name = new_link_name(hello.worker_id, hello.generation)
        self.dialer = SimKvDialer(self.network, self.host, name, config.kv_hwm, self.kv_thread.wake)
        self.sender = SimSender(
            KvHello(PROTOCOL_VERSION, hello.worker_id, hello.generation, hello.fingerprint, hello.layout),
            HashSource(self.engine, self.scheduler),
            self.inbox,
            SenderTiming(config.keepalive, config.lease),
            self.dialer,
            ThreadHandle(self.kv_thread),
            FrameOptions(with_checksum=config.with_checksum, together_bytes=TOGETHER_BYTES),
        )
        return PrefillRole(self.engine, self.scheduler, self.sender, clock=self.timeline.clock)

    def _kv_turn(self) -> float:
        wait = self.sender.turn(self.timeline.now)
        self.watch.after_kv_turn(self)
        return wait

    def _close_kv(self) -> None:
        self.dialer.close()


class DecodeNode(WorkerNode):
    role_kind = Role.DECODE

    def pool_size(self) -> tuple[int, int]:
        return self.config.decode_blocks, self.config.decode_block_size

    @property
    def kv_endpoint(self) -> str:
        """A restarted worker gets its old port back, or another one."""
        return f"tcp://{self.host}:{1 + (self.life % 3 == 2)}"

    def _make_role(self) -> DecodeRole:
        config = self.config
        limits = DecodeLimits(
            max_num_prefill_tokens=config.max_num_prefill_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            lease=ROOM_SHARE * config.lease,
            queue_timeout=config.queue_timeout,
            offer_timeout=config.queue_timeout + config.lease,
        )
        swap = SwapSpace(config.swap_blocks, config.decode_block_size) if config.swap_blocks else None
        self.scheduler = DecodeScheduler(self.engine.pool, config.queue_rules, limits, self.engine.eos_token_ids, swap)
        self.sink = HashSink(self.engine, self.scheduler, self.model)
        self.listener = SimKvListener(
            self.network, self.host, self.kv_endpoint, config.kv_back_hwm, self.kv_thread.wake
        )
        self.listener.on_send = lambda link, message: self.watch.handover.decode_says(self, message)
        self.receiver = SimReceiver(
            self.listener,
            self.hello,
            self.sink,
            ReceiverLimits(config.window_bytes, config.lease),
            self.inbox,
            ThreadHandle(self.kv_thread),
        )
        return DecodeRole(self.engine, self.scheduler, self.receiver, clock=self.timeline.clock)

    def _kv_turn(self) -> float:
        wait = self.receiver.turn(self.timeline.now)
        self.watch.after_kv_turn(self)
        return wait

    def _close_kv(self) -> None:
        self.listener.close()
