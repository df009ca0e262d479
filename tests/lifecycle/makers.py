"""Requests and ends for scheduler tests: no model, no socket, and the clock is an argument."""

from decode.scheduler import DecodeJob, DecodeLimits, DecodeScheduler
from engine.block_pool import BlockPool
from engine.queue_rules import QueueRules
from engine.request import StepResult
from engine.swap_space import SwapSpace
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import Drawn, RequestSpec, Sibling
from prefill.scheduler import PrefillJob, PrefillLimits, PrefillScheduler
from tests.kvtransfer.samples import spec

EOS = 1
TARGET = DecodeTarget("decode-0", "g2", "tcp://127.0.0.1:9")
PEER = ("prefill-0", "g1")


def rules_and_limits(settings: dict) -> tuple[QueueRules, dict]:
    """Prompts here are all alike, so blocks are shared only where a test says so."""
    rules = {"max_waiting": 8, "share_prefixes": False, "by_priority": False}
    rules |= {name: settings.pop(name) for name in list(settings) if name in rules}
    return QueueRules(**rules), settings


def siblings_of(leader: RequestSpec, num_siblings: int) -> list[RequestSpec]:
    """Further choices of a request "r": "r.1", "r.2", ..."""
    return [Sibling(f"{leader.request_id}.{index}", index).spec(leader) for index in range(1, num_siblings + 1)]


class Prefill:
    """A prefill scheduler with its pool, a new one unless `pool` is that of a role before it."""

    def __init__(self, num_blocks=16, block_size=4, pool=None, **limits) -> None:
        defaults = {
            "max_num_batched_tokens": 8,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "queue_timeout": 100.0,
        }
        self.pool = pool or BlockPool(num_blocks, block_size)
        rules, limits = rules_and_limits(defaults | limits)
        self.scheduler = PrefillScheduler(self.pool, rules, PrefillLimits(**limits), frozenset({EOS}))

    def add(
        self, request_id="r", num_prompt=4, now=0.0, target=TARGET, gateway="gw", num_siblings=0, **sampling
    ) -> PrefillJob:
        leader = spec(request_id, num_prompt, **sampling)
        self.added = job, *followers = [
            PrefillJob(spec=member, gateway=gateway, target=target)
            for member in (leader, *siblings_of(leader, num_siblings))
        ]
        self.scheduler.add(job, now, followers)
        return job

    def step(self, now=1.0, token_id=50, tokens=None) -> dict[str, tuple[int, int]]:
        """One step in which every finished prompt samples `token_id`, or what `tokens` has for its request id; the rows
        by request id."""
        rows = self.scheduler.schedule(now)
        drawn = [(tokens or {}).get(row.request.spec.request_id, token_id) if row.samples else None for row in rows]
        self.scheduler.complete(rows, StepResult(drawn), now)
        self.check()
        return {row.request.spec.request_id: (row.start, row.stop) for row in rows}

    def ended(self, request_id="r", outcome=TransferOutcome.DONE, now=2.0, reason="") -> None:
        self.scheduler.transfer_ended(TransferEnded((request_id, 0), outcome, reason), now)
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_all_is_empty(self) -> None:
        self.check()
        assert len(self.scheduler) == self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.pool.num_free == self.pool.num_blocks


class Decode:
    """A decode scheduler with its pool."""

    def __init__(self, num_blocks=16, block_size=4, swap_blocks=0, pool=None, **limits) -> None:
        defaults = {
            "max_num_prefill_tokens": 8,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "lease": 10.0,
            "queue_timeout": 100.0,
            "offer_timeout": 100.0,
        }
        self.pool = pool or BlockPool(num_blocks, block_size)
        rules, limits = rules_and_limits(defaults | limits)
        self.swap = SwapSpace(swap_blocks, block_size) if swap_blocks else None
        self.scheduler = DecodeScheduler(self.pool, rules, DecodeLimits(**limits), frozenset({EOS}), self.swap)

    def add(
        self, request_id="r", num_prompt=4, now=0.0, gateway="gw", offered=True, local=False, num_siblings=0, **sampling
    ) -> DecodeJob:
        peer = None if local else PEER
        leader = spec(request_id, num_prompt, **sampling)
        self.added = job, *followers = [
            DecodeJob(spec=member, gateway=gateway, peer=peer)
            for member in (leader, *siblings_of(leader, num_siblings))
        ]
        self.scheduler.add(job, now, followers)
        if offered and not local:
            self.offer(request_id, now)
        return job

    def offer(self, request_id="r", now=0.0) -> None:
        self.scheduler.offered(KvOffered((request_id, 0)), now)

    def arrive(self, request_id="r", token_id=50, now=1.0, **siblings) -> None:
        self.ended(request_id, ReceptionOutcome.ARRIVED, token_id, now, **siblings)

    def ended(
        self, request_id="r", outcome=ReceptionOutcome.CLOSED, token_id=None, now=1.0, reason="", sibling_tokens=None
    ) -> None:
        siblings = {name: Drawn(token) for name, token in (sibling_tokens or {}).items()}
        event = ReceptionEnded((request_id, 0), outcome, token_id, None, reason, siblings)
        self.scheduler.reception_ended(event, now)
        self.check()

    def step(self, now=2.0, token_id=60, tokens=None) -> list[str]:
        """One step in which every row that samples gets `token_id`, or what `tokens` has for its request id; the ids of
        the requests that took part. `copies`: what was copied for it."""
        rows = self.scheduler.schedule(now)
        self.copies = self.scheduler.take_copies()
        drawn = [(tokens or {}).get(row.request.spec.request_id, token_id) if row.samples else None for row in rows]
        self.scheduler.complete(rows, StepResult(drawn), now)
        self.check()
        return [row.request.spec.request_id for row in rows]

    check = Prefill.check

    def check_all_is_empty(self) -> None:
        Prefill.check_all_is_empty(self)
        swap = self.scheduler.load().swap
        assert swap.num_free == swap.num_blocks


def words_of(world) -> list:
    """What the gateways have to know, without decode's notices that a request has its room."""
    return [item for item in world.scheduler.take_outputs() if item.output.token_ids or item.output.end]


def outputs_of(world) -> list:
    """(request id, start, token ids, end reason) of each word."""
    return [
        (item.output.request_id, item.output.start, item.output.token_ids, item.output.end and item.output.end.reason)
        for item in words_of(world)
    ]


def commands_of(world) -> list:
    """What the transfer thread is to do, as (name of the command, request id)."""
    return [
        (type(command).__name__, command.request.key[0] if hasattr(command, "request") else command.key[0])
        for command in world.scheduler.take_commands()
    ]
