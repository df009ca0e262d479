"""One world: a cluster with clients and faults, from its seed to its rest.

0 ........... trouble_s ............... + settle_s ........... + lease
| clients, faults | healed: all must end | probes: all answered | at rest: nothing is left
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.backend import InvalidRequestError, OverloadedError, RequestFailedError, Traits, UnavailableError
from gateway.gathering import Gathering
from gateway.merge import InconsistentOutputError
from gateway.modes import Mode
from kvtransfer.request_parts import SamplingParams
from kvtransfer.worker_facts import Role
from tests.simulation.clients import Ask, Client, State, draw_asks
from tests.simulation.config import Climate, WorldConfig, draw_config
from tests.simulation.errors import ViolationError, require
from tests.simulation.faults import Fault, Handlers, Trouble, draw_troubles
from tests.simulation.gateway_node import GatewayNode, endpoint_of
from tests.simulation.invariants import Invariants
from tests.simulation.model import HashModel
from tests.simulation.network import Network
from tests.simulation.noise import Noise
from tests.simulation.process import Process
from tests.simulation.timeline import Timeline
from tests.simulation.worker_node import DecodeNode, PrefillNode, WorkerNode

LOOK_S = 0.25
NUM_PROBES = 3
COME_BACK_S = 0.3  # from the end of a process that was told to stop to its next life


@dataclass
class Errors(logging.Handler):
    """Collects what the code logs with a traceback: a bug that an exception boundary has swallowed."""

    def __post_init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.breaches: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
        elif "broke the protocol" in record.getMessage():
            self.breaches.append(record.getMessage())

    __hash__ = logging.Handler.__hash__


@contextmanager
def listening() -> Iterator[Errors]:
    """Errors that are logged meanwhile; the rest of the log is silent."""
    errors, root = Errors(), logging.getLogger()
    before = root.manager.disable
    logging.disable(logging.WARNING)
    handlers, root.handlers = root.handlers, [errors]
    try:
        yield errors
    finally:
        root.handlers = handlers
        logging.disable(before)


class World:
    """All processes of one seed."""

    def __init__(self, seed: int) -> None:
        self.timeline = Timeline(seed)
        self.config: WorldConfig = draw_config(self.timeline.rng("config"))
        self.network = Network(self.timeline, self.config.latency, self.config.fragility)
        self.noise = Noise(self.timeline.rng("noise"), self.config.damage, self.config.loss)
        self.network.tamper = self.noise if self.config.damage or self.config.loss else None
        self.model = HashModel(self.config.num_layers)
        self.nodes: dict[str, WorkerNode | GatewayNode] = {}
        self.invariants = Invariants(self.config, self.network, self.model, self.nodes)
        self.clients: list[Client] = []
        self.troubles: list[Trouble] = []
        self.is_healed = False
        self._lives: dict[str, int] = {}
        self._num_to_come = 0
        self._handlers: Handlers = {
            Fault.BREAK: self._break,
            Fault.BLOCK_ONE_WAY: self._block_one_way,
            Fault.BLOCK: self._block,
            Fault.CRASH: self._crash,
            Fault.PAUSE: self._pause,
            Fault.SLOW: self._slow,
            Fault.STOP: self._stop,
            Fault.CRASH_GATEWAY: self._crash,
            Fault.PAUSE_GATEWAY: self._pause,
        }

    # --- the whole of it

    def run(self) -> None:
        """Raises ViolationError."""
        with listening() as errors:
            self._errors = errors
            try:
                self._live()
            except ViolationError as violation:
                raise ViolationError(self.invariants.renamed(str(violation))) from violation
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
                raise ViolationError(self.invariants.renamed(what)) from error
            finally:
                for node in self.nodes.values():
                    node.die()

    def _live(self) -> None:
        self._build()
        self.timeline.run_until(self.config.trouble_s)
        self._heal()
        self._settle()
        self._probe()
        self._come_to_rest()

    def _build(self) -> None:
        config = self.config
        gateways = [f"gateway-{number}" for number in range(config.num_gateways)]
        workers = [f"prefill-{number}" for number in range(config.num_prefill)]
        workers += [f"decode-{number}" for number in range(config.num_decode)]
        starts = self.timeline.rng("starts")
        for host in gateways + workers:
            self.timeline.at(0.0 if starts.random() < 0.7 else starts.uniform(0, 0.3), self._start, host)
        for ask in draw_asks(self.timeline.rng("clients"), config):
            self._num_to_come += 1
            self.timeline.at(ask.at, self._ask, ask)
        self.troubles = draw_troubles(self.timeline.rng("faults"), config, workers, gateways)
        for trouble in self.troubles:
            self.timeline.at(trouble.at, self._befall, trouble)

    def _start(self, host: str) -> None:
        former = self.nodes.get(host)
        if former is not None and former.is_alive:
            return
        self._lives[host] = life = self._lives.get(host, 0) + 1
        if host.startswith("gateway"):
            node: WorkerNode | GatewayNode = GatewayNode(self.config, self.network, self.invariants, host, life)
        else:
            kind = PrefillNode if host.startswith("prefill") else DecodeNode
            gateways = [endpoint_of(f"gateway-{number}") for number in range(self.config.num_gateways)]
            node = kind(self.config, self.network, self.model, self.invariants, gateways, host, life)
        self.nodes[host] = node
        node.start()

    def _ask(self, ask: Ask) -> None:
        self._num_to_come -= 1
        node = self.nodes.get(f"gateway-{ask.gateway}")
        if isinstance(node, GatewayNode) and node.is_alive:
            gathering: Gathering[Any] = Gathering(ask.num_choices)
            choices = [ask.choice(index) for index in range(ask.num_choices)]
            self.clients += [Client(choice, node, self.model, gathering) for choice in choices]

    # --- faults

    def _befall(self, trouble: Trouble) -> None:
        if not self.is_healed and trouble.host in self.nodes:
            self.timeline.note("fault", str(trouble))
            self._handlers[trouble.fault](trouble)

    def _until(self, trouble: Trouble) -> float:
        return min(self.timeline.now + trouble.seconds, self.config.trouble_s)

    def _break(self, trouble: Trouble) -> None:
        for connection in self.network.between(trouble.host, trouble.other or ""):
            connection.break_off()

    def _block_one_way(self, trouble: Trouble) -> None:
        self.network.block(trouble.host, trouble.other or "", self._until(trouble))

    def _block(self, trouble: Trouble) -> None:
        self._block_one_way(trouble)
        self.network.block(trouble.other or "", trouble.host, self._until(trouble))

    def _crash(self, trouble: Trouble) -> None:
        node = self.nodes[trouble.host]
        if node.is_alive:
            self._bury(node)
            self.timeline.at(self._until(trouble), self._start, trouble.host)

    def _bury(self, node: Process) -> None:
        node.note("is killed")
        node.die()

    def _pause(self, trouble: Trouble) -> None:
        node = self.nodes[trouble.host]
        node.paused_until = self._until(trouble)
        self.network.silence(trouble.host, node.paused_until)

    def _slow(self, trouble: Trouble) -> None:
        node = self.nodes[trouble.host]
        node.slowness = 10.0
        self.timeline.at(self._until(trouble), setattr, node, "slowness", 1.0)

    def _stop(self, trouble: Trouble) -> None:
        node = self.nodes[trouble.host]
        if isinstance(node, WorkerNode) and node.is_alive:
            node.stop()
            self._come_back(node)

    def _come_back(self, node: WorkerNode) -> None:
        if not node.is_alive:
            require(node.exit_code in (0, None), node.title, "ended with", node.exit_code)
            self.timeline.after(COME_BACK_S, self._start, node.host)
        else:
            self.timeline.after(COME_BACK_S, self._come_back, node)

    def _heal(self) -> None:
        self.timeline.note("world", "is healed")
        self.is_healed = True
        self.network.heal()
        if not self.config.is_calm:
            self.network.tamper = None
        for node in self.nodes.values():
            node.paused_until = min(node.paused_until, self.timeline.now)
            node.slowness = 1.0

    # --- after the healing

    def _settle(self) -> None:
        """All clients have ended and all workers are known to all gateways, in bounded time."""
        stop = self.timeline.now + self.config.settle_s
        while not (self._all_over() and self._all_known()):
            require(self.timeline.now < stop, "after", self.config.settle_s, "s:", self._unsettled())
            self.timeline.run_until(self.timeline.now + LOOK_S)
            self._check_log()
        for client in self.clients:
            self._check_error(client)

    def _check_log(self) -> None:
        require(not self._errors.found, "an exception was swallowed:", self._errors.found)
        if self.network.num_broken == 0:
            require(not self._errors.breaches, "nothing was lost, and yet:", self._errors.breaches)

    def _all_over(self) -> bool:
        return self._num_to_come == 0 and all(client.is_over for client in self.clients)

    def _all_known(self) -> bool:
        workers = {(node.host, node.hello.generation) for node in self.nodes.values() if isinstance(node, WorkerNode)}
        return all(node.is_alive for node in self.nodes.values()) and all(
            workers == {(worker.worker_id, worker.generation) for worker in gateway.cluster.workers}
            and all(gateway.cluster.capable(role, self.timeline.now) for role in Role)
            for gateway in self._gateways()
        )

    def _gateways(self) -> list[GatewayNode]:
        return [node for node in self.nodes.values() if isinstance(node, GatewayNode)]

    def _unsettled(self) -> str:
        waiting = [client.ask.name for client in self.clients if not client.is_over]
        return f"clients {waiting} wait" if waiting else "not all workers are known to all gateways"

    def _check_error(self, client: Client) -> None:
        """Which errors a client may get depends on what has gone wrong."""
        error, climate = client.error, self.config.climate
        if error is None:
            return
        what = (client.ask.name, f"got {error!r}")
        require(not isinstance(error, InconsistentOutputError) and str(error) != "internal error", *what)
        if not client.ask.is_possible:
            require(isinstance(error, InvalidRequestError | OverloadedError | UnavailableError), *what)
            return
        require(not isinstance(error, InvalidRequestError), *what)
        require(not self.config.is_calm, *what, "although nothing is wrong")
        require(not isinstance(error, RequestFailedError), *what, "although others could have taken it over")
        if climate is Climate.CLIENTS:
            require(not isinstance(error, UnavailableError), *what, "although all workers are well")

    def _probe(self) -> None:
        """Recovered means three green probes in a row at each gateway, in bounded time. Where nothing was wrong, the
        first three."""
        stop = self.timeline.now + (0.0 if self.config.is_calm else self.config.settle_s)
        for gateway in self._gateways():
            num_green = 0
            while num_green < NUM_PROBES:
                probe = self._probe_once(Client(self._probe_ask(num_green), gateway, self.model))
                num_green = num_green + 1 if probe.state is State.FINISHED else 0
                if num_green == 0:
                    require(self.timeline.now < stop, probe.ask.name, f"got {probe.error!r} after the healing")
                    self.timeline.run_until(self.timeline.now + LOOK_S)

    def _probe_once(self, probe: Client) -> Client:
        self.timeline.run_until(self.timeline.now + self.config.settle_s, lambda: probe.is_over)
        require(probe.is_over, probe.ask.name, "is not answered within", self.config.settle_s, "s")
        return probe

    def _probe_ask(self, number: int) -> Ask:
        sampling = SamplingParams(max_tokens=4, seed=number, ignore_eos=True)
        return Ask(
            f"probe{number}", self.timeline.now, 0, (5 + number, 6, 7, 8), sampling, Traits(mode=Mode.DISAGGREGATED)
        )

    def _come_to_rest(self) -> None:
        stop = self.timeline.now + self.config.rest_s
        while not all(self.invariants.is_at_rest(node) for node in self.nodes.values()):
            if self.timeline.now >= stop:
                break
            self.timeline.run_until(self.timeline.now + LOOK_S)
        self.timeline.run_until(self.timeline.now + LOOK_S)  # the last words are on their way
        self._check_log()
        for node in self.nodes.values():
            self.invariants.check_at_rest(node)
        if self.config.is_calm:
            self.invariants.handover.check_damage(self.noise.num_damaged)
