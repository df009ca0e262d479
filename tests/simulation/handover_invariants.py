"""What must hold of the KV hand-over: bytes on the wire, credits, acknowledgements, and who touches which blocks."""

from collections.abc import Callable, Mapping
from typing import Any

from kvtransfer.codec import RequestKey
from kvtransfer.kv_messages import KvCredit, KvDone
from kvtransfer.outgoing import OutgoingTransfer
from tests.simulation.config import WorldConfig
from tests.simulation.errors import require
from tests.simulation.model import HashModel
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.worker_node import DecodeNode, PrefillNode

MAX_ABORTS = 256


class HandoverInvariants:
    """`done`: what which decode worker has acknowledged, or tried to."""

    def __init__(
        self,
        config: WorldConfig,
        network: Network,
        model: HashModel,
        nodes: Mapping[str, Process],
        name: Callable[[RequestKey], str],
    ) -> None:
        self._config, self._network, self._model, self._nodes, self._name = config, network, model, nodes, name
        self.done: set[tuple[str, RequestKey]] = set()

    def check_sender(self, node: PrefillNode) -> None:
        machine = node.sender.machine
        for transfer in machine._book:
            job = node.scheduler.find(transfer.key)
            require(job is not None and job.lent, node.title, transfer.key, "is shipped, but its blocks are not lent")
            window = max(transfer.window_bytes, transfer.piece_bytes_per_token)
            peer = machine._peers[machine._peer_of[transfer.key]]
            require(peer.target == job.target, node.title, self._name(transfer.key), "is shipped to", peer.target)
            in_flight = transfer.sent_bytes - self._passed_bytes(peer, transfer)
            require(in_flight <= window, node.title, transfer.key, in_flight, "bytes in flight, window", window)
        require(len(machine._aborts) <= MAX_ABORTS, node.title, "owes", len(machine._aborts), "aborts")
        for name in node.dialer.refused:
            require(machine._peers[name].refusal is not None, node.title, "uses a link that", name, "has refused")

    def _passed_bytes(self, peer: Any, transfer: OutgoingTransfer) -> int:
        """What is really on its way no more; if the decode worker is dead, what its credits say."""
        node = self._nodes.get(peer.target.worker_id)
        if isinstance(node, DecodeNode) and node.hello.generation == peer.target.generation:
            return node.listener.passed_bytes.get(transfer.key, 0)
        return transfer.credited_bytes

    def check_receiver(self, node: DecodeNode) -> None:
        for transfer in node.receiver.machine._book:
            job = node.scheduler.find(transfer.key)
            require(job is not None and job.lent, node.title, transfer.key, "is received, but its blocks are not lent")
            received = node.listener.received_bytes[transfer.key]
            settled = sum(stream.settled_bytes for stream in transfer.streams.values())
            require(settled >= received, node.title, transfer.key, received, "bytes have come,", settled, "are settled")

    def decode_says(self, node: DecodeNode, message: Any) -> None:
        match message:
            case KvCredit(request_id, attempt, settled_bytes):
                self._check_credit(node, (request_id, attempt), settled_bytes)
            case KvDone(request_id, attempt):
                self._check_done(node, (request_id, attempt))

    def _check_credit(self, node: DecodeNode, key: RequestKey, settled: int) -> None:
        """Where nothing is lost or damaged, it is what was copied."""
        copied, passed = node.sink.spliced_bytes.get(key, 0), node.listener.passed_bytes.get(key, 0)
        is_exact = self._network.num_lost == 0 and self._config.damage == 0
        low, high = copied, copied if is_exact else passed
        require(low <= settled <= high, node.title, "credits", settled, "bytes;", copied, "copied,", passed, "passed")

    def _check_done(self, node: DecodeNode, key: RequestKey) -> None:
        """Said once more to an offer that came late, when the blocks may be another's already."""
        self.done.add((node.title, key))
        if node.receiver.machine._book.get(key) is None:
            return
        require(key in node.sink.finished, node.title, self._name(key), "is acknowledged before its KV can be read")
        job = node.scheduler.find(key)
        require(job is not None, node.title, self._name(key), "is acknowledged and unknown")
        digests = self._model.digests(job.token_slice(0, job.num_prefill))
        for layer in range(self._config.num_layers):
            entries = [self._model.entry(layer, digest) for digest in digests]
            found = node.engine.kv_cache.read(job, layer, 0, len(entries))
            require(found == entries, node.title, self._name(key), "is acknowledged, and layer", layer, "is not here")

    def check_damage(self, num_damaged: int) -> None:
        """Each damaged frame was found and counted by the worker that got it, where none has died since."""
        decode = [node for node in self._nodes.values() if isinstance(node, DecodeNode)]
        found = sum(node.receiver.counts.num_corrupt for node in decode)
        require(found == num_damaged, found, "damaged frames were found,", num_damaged, "were delivered")
