"""What must hold after every turn, and what must be left at rest: nothing."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from engine.request import Request
from gateway.observer import RequestOutcome
from kvtransfer.codec import RequestKey
from kvtransfer.control import FromGateway, GatewayLost
from kvtransfer.errors import MessageError
from kvtransfer.incoming import ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest, StepOutput, Welcome
from kvtransfer.request_parts import EndReason, RequestOutput, RequestSpec
from tests.simulation.config import Climate, WorldConfig
from tests.simulation.counts import Counts
from tests.simulation.errors import require
from tests.simulation.gateway_node import GatewayNode
from tests.simulation.handover_invariants import HandoverInvariants
from tests.simulation.model import HashModel
from tests.simulation.network import Network
from tests.simulation.worker_node import DecodeNode, PrefillNode, WorkerNode

NOTICE_S = 0.6  # beside the silence after which a worker is given up: ticks, and what was still on its way


class Invariants:
    """Listens at every wire and looks into every book."""

    def __init__(
        self, config: WorldConfig, network: Network, model: HashModel, nodes: Mapping[str, WorkerNode | GatewayNode]
    ) -> None:
        self._config, self._network, self._model, self._nodes = config, network, model, nodes
        self._counts = Counts(network, nodes)
        self._specs: dict[RequestKey, RequestSpec] = {}
        self._answers: dict[RequestKey, list[int]] = {}
        self._said: dict[tuple[str, str, RequestKey], int] = {}  # output tokens, by worker, gateway and request
        self._ended: set[tuple[str, str, RequestKey]] = set()
        self._taken: dict[tuple[str, str, RequestKey], int] = {}  # the link's introduction
        self._told: dict[str, dict[tuple[str, RequestKey], bool]] = {}  # by gateway: who has which request
        self._outcomes: Counter[str] = Counter()
        self.num_local = 0  # attempts whose prompt decode computes
        self.num_groups = 0  # messages for several choices of a prompt
        self._names: dict[str, str] = {}
        self._to_go: dict[str, list[Request]] = {}  # by worker: what it has been told to cancel
        self._cancelled: set[tuple[str, RequestKey]] = set()
        self.handover = HandoverInvariants(config, network, model, nodes, self.name)

    # --- a worker

    def after_kv_turn(self, node: WorkerNode) -> None:
        if isinstance(node, PrefillNode):
            self.handover.check_sender(node)
        elif isinstance(node, DecodeNode):
            self.handover.check_receiver(node)

    def after_turn(self, node: WorkerNode) -> None:
        self.after_kv_turn(node)
        if not node.role.is_empty():  # the worker does it itself when it comes to be empty
            node.role.check_integrity()
        waiting = len(node.scheduler._waiting)
        require(waiting <= self._config.max_waiting, node.title, "has", waiting, "waiting")
        if not node.inbox.backlog:
            for request in self._to_go.pop(node.title, ()):
                require(request.is_over, node.title, self.name(request.key), "goes on after its cancellation")

    def worker_takes(self, node: WorkerNode, event: Any) -> None:
        match event:
            case FromGateway(gateway, Cancel(request_id, attempt)):
                self._must_go(node, lambda request: request.key == (request_id, attempt) and request.gateway == gateway)
                self._cancelled.add((node.title, (request_id, attempt)))
            case FromGateway(gateway, message):
                for spec in message.specs:
                    key = (spec.request_id, spec.attempt)
                    self._taken[node.title, gateway, key] = node.links._links[gateway].introduction
                self._check_inbox(node)
            case GatewayLost(gateway):
                self._must_go(node, lambda request: request.gateway == gateway)
                self._cancelled |= {(title, key) for title, owner, key in self._taken if owner == gateway}
            case ReceptionEnded(key, ReceptionOutcome.ARRIVED):
                require(
                    (node.title, key) in self.handover.done, node.title, self.name(key), "has arrived unacknowledged"
                )
            case ReceptionEnded(reason=reason) if reason.startswith("nothing heard"):
                may_be = self._config.climate in (Climate.NETWORK, Climate.ALL)
                require(may_be, node.title, self.name(event.key), "lost its lease:", reason)

    def _must_go(self, node: WorkerNode, is_meant: Callable[[Request], bool]) -> None:
        meant = [request for request in node.scheduler._requests.values() if is_meant(request)]
        self._to_go.setdefault(node.title, []).extend(meant)

    def _check_inbox(self, node: WorkerNode) -> None:
        items = node.inbox.peek()
        waiting = sum(1 for item in items if isinstance(item, FromGateway) and not isinstance(item.message, Cancel))
        require(waiting <= self._config.max_waiting, node.title, "has", waiting, "requests in its inbox")

    def worker_says(self, node: WorkerNode, gateway: str, message: Any) -> None:
        if isinstance(message, StepOutput):
            for output in message.outputs:
                self._check_output(node, gateway, output)

    def _check_output(self, node: WorkerNode, gateway: str, output: RequestOutput) -> None:
        key = (output.request_id, output.attempt)
        where = (node.title, gateway, key)
        require(where not in self._ended, node.title, self.name(key), "spoke after its terminal word:", output)
        known = self._said.get(where, len(self._specs[key].output_token_ids))
        # Behind another introduction the gateway has given the attempt up; the engine is yet to hear of it.
        is_current = self._taken.get(where) == node.links._links[gateway].introduction
        require(output.start <= known or not is_current, node.title, self.name(key), "skips output tokens from", known)
        stop = output.start + len(output.token_ids)
        expected = self._answer(key)[output.start : stop]
        require(
            list(output.token_ids) == expected, node.title, self.name(key), "says", output.token_ids, "not", expected
        )
        self._said[where] = max(known, stop)
        if output.end is not None:
            self._ended.add(where)
            is_due = output.end.reason is not EndReason.CANCELLED or (node.title, key) in self._cancelled
            require(is_due, node.title, self.name(key), "is cancelled, and nobody has asked for it")
            node.note(f"{self.name(key)} ends: {output.end.reason.value} {output.end.message}")

    def _answer(self, key: RequestKey) -> list[int]:
        if key not in self._answers:
            spec = self._specs[key]
            self._answers[key] = self._model.answer(spec.prompt_token_ids, spec.sampling)[0]
        return self._answers[key]

    # --- a gateway

    def after_loop(self, node: GatewayNode) -> None:
        node.dispatcher.check_integrity()
        self._check_bounds(node)
        self._check_the_dead(node)
        self._counts.check(node)
        if self._network.num_broken == 0:
            self._check_told(node)

    def _check_bounds(self, node: GatewayNode) -> None:
        flights = node.dispatcher._flights._flights
        limit = self._config.max_in_flight
        require(len(flights) <= limit, node.title, "has", len(flights), "requests in flight, at most", limit)
        limit = self._config.stream_buffer_tokens
        for flight in flights.values():
            waiting = sum(len(delta.token_ids) for delta in flight.stream._deltas)
            require(waiting <= limit, node.title, flight.request_id, "keeps", waiting, "tokens, at most", limit)

    def _check_the_dead(self, node: GatewayNode) -> None:
        """A gateway that has not been stopped itself notices in bounded time."""
        now = self._network.timeline.now
        if now < node.paused_until + self._config.worker_dead_after:
            return
        for worker in node.cluster.workers:
            died_at = self._network.deaths.get((worker.worker_id, worker.generation), now)
            silent = now - max(died_at, node.paused_until)
            require(
                silent < self._config.worker_dead_after + NOTICE_S, node.title, "takes", worker.worker_id, "for live"
            )

    def _check_told(self, node: GatewayNode) -> None:
        """As long as no connection breaks, every live worker that has a request which is over has been told so."""
        flights, live = node.keys_in_flight(), node.cluster._workers
        for worker_id, key in self._told.get(node.title, {}):
            is_told = key in flights or worker_id not in live
            require(is_told, worker_id, "was not told that nobody waits for", self.name(key))

    def gateway_says(self, node: GatewayNode, worker_id: str, message: Any) -> None:
        told = self._told.setdefault(node.title, {})
        match message:
            case PrefillRequest() | DecodeRequest():
                self.num_local += isinstance(message, DecodeRequest) and message.source is None
                self.num_groups += bool(message.siblings)
                for spec in message.specs:
                    key = (spec.request_id, spec.attempt)
                    self._specs[key] = spec
                    told[worker_id, key] = True
                    node.note(f"{self.name(key)} goes to {worker_id}")
            case Cancel(request_id, attempt):
                told.pop((worker_id, (request_id, attempt)), None)
            case Welcome():
                for name in [name for name in told if name[0] == worker_id]:
                    del told[name]

    def gateway_hears(self, node: GatewayNode, worker_id: str, message: Any) -> None:
        require(not isinstance(message, MessageError), node.title, "hears from", worker_id, message)
        if isinstance(message, StepOutput):
            for output in message.outputs:
                if output.end is not None:
                    self._told.get(node.title, {}).pop((worker_id, (output.request_id, output.attempt)), None)

    def request_ended(self, node: GatewayNode, outcome: RequestOutcome) -> None:
        self._outcomes[outcome.request_id] += 1
        require(self._outcomes[outcome.request_id] == 1, node.title, outcome.request_id, "was reported ended twice")

    def name(self, key: RequestKey) -> str:
        """A short name that is the same in each run of a seed."""
        number = self._names.setdefault(key[0], f"r{len(self._names)}")
        return f"{number}.{key[1]}"

    def renamed(self, text: str) -> str:
        """Ids are drawn anew in each run; a text with them would be another each time."""
        for request_id, name in self._names.items():
            text = text.replace(request_id, name)
        return text

    # --- at rest

    def is_at_rest(self, node: WorkerNode | GatewayNode) -> bool:
        """Whether nothing is left but what time will clear."""
        if isinstance(node, GatewayNode):
            return node.dispatcher.in_flight == 0
        return node.role.is_empty() and not node.inbox.backlog and not self._leftovers(node)

    def check_at_rest(self, node: WorkerNode | GatewayNode) -> None:
        if isinstance(node, GatewayNode):
            self._check_gateway_at_rest(node)
            return
        require(node.role.is_empty(), node.title, "still has", list(map(self.name, node.scheduler._requests)))
        require(not (left := self._leftovers(node)), node.title, "still has", left)
        pool = node.engine.pool
        require(
            pool.num_free == pool.num_blocks, node.title, "has", pool.num_free, "of", pool.num_blocks, "blocks free"
        )
        load = node.scheduler.load()
        require(load.swap.num_free == load.swap.num_blocks, node.title, "still has KV on the host")
        self._check_all_ended(node)

    def _leftovers(self, node: WorkerNode) -> dict[str, Any]:
        machine = node.sender.machine if isinstance(node, PrefillNode) else node.receiver.machine
        books = {"transfers": machine._book}
        if isinstance(node, PrefillNode):
            books |= {"aborts": machine._aborts, "peers of": machine._peer_of}
        else:
            books |= {"parked offers": machine._book._parked, "first frames": machine._ends._first_frame_at}
        return {name: list(book) for name, book in books.items() if len(book)}

    def _check_all_ended(self, node: WorkerNode) -> None:
        """What was taken from a gateway on the link as it is now has got its terminal word."""
        for (title, gateway, key), introduction in self._taken.items():
            if title == node.title and node.links._links[gateway].introduction == introduction:
                require((title, gateway, key) in self._ended, title, self.name(key), "never got its terminal word")

    def _check_gateway_at_rest(self, node: GatewayNode) -> None:
        node.dispatcher.check_integrity()
        require(node.dispatcher.in_flight == 0, node.title, "still has", node.dispatcher.in_flight, "requests")
        book = node.dispatcher._flights.book
        require(not book.entries, node.title, "still has booked", book.entries)
