"""The prefill role without a model: KV bytes out of a paged pool, and the scheduler's commands to the sender."""

from types import SimpleNamespace

import pytest
import torch

from engine.block_pool import BlockPool
from engine.kv_cache import KvCache
from engine.queue_rules import QueueRules
from engine.request import StepResult
from kernels.reference import ReferenceKernels
from kvtransfer.incoming import ReceptionEnded, ReceptionOutcome
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest, PrefillSource
from kvtransfer.outgoing import Piece, TransferEnded, TransferOutcome
from kvtransfer.request_parts import EndReason, LifetimeEvent
from kvtransfer.worker_facts import KvLayout, KvTraffic, Load
from prefill.scheduler import PrefillLimits, PrefillScheduler
from prefill.worker import PoolSource, PrefillRole
from tests.kvtransfer.samples import FINGERPRINT, TARGET, spec

KEY = ("r", 0)
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 4


class RecordingSender:
    """In place of KvSender: keeps what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list = []
        self.traffic = KvTraffic(num_bytes=5)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


class FakeRunner:
    """Computes nothing; says that each layer is done, and samples 50 wherever a row ends its prompt."""

    def step(self, rows, on_layer=None):
        for layer in range(NUM_LAYERS):
            on_layer(layer)
        return StepResult([50 if row.samples else None for row in rows])


def engine_with(block_size=4, dtype="float32", num_blocks=8):
    layout = KvLayout(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype, block_size)
    kv_cache = KvCache(layout, num_blocks, ReferenceKernels(), torch.device("cpu"))
    return SimpleNamespace(
        kv_cache=kv_cache,
        pool=BlockPool(num_blocks, block_size),
        layout=layout,
        fingerprint=FINGERPRINT,
        max_model_len=32,
        runner=FakeRunner(),
    )


def scheduler_of(engine, **limits) -> PrefillScheduler:
    defaults = {
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": 32,
        "queue_timeout": 100.0,
    }
    return PrefillScheduler(
        engine.pool, QueueRules(max_waiting=8), PrefillLimits(**(defaults | limits)), frozenset({1})
    )


@pytest.fixture
def role():
    engine = engine_with()
    return PrefillRole(engine, scheduler_of(engine), RecordingSender(), clock=lambda: 1.0)


def calls_of(role) -> list:
    calls, role._sender.calls = role._sender.calls, []
    return calls


def ends_of(role) -> list:
    return [(gateway, output.request_id, output.end and output.end.reason) for gateway, output in role.flush()]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_bytes_are_the_tokens_in_order(block_size, dtype):
    cache = engine_with(block_size, dtype, num_blocks=16).kv_cache
    torch_dtype = getattr(torch, dtype)
    block_ids = list(reversed(range(16)))[: -(-10 // block_size)]
    key, value = (torch.randn(NUM_LAYERS, 10, NUM_HEADS, HEAD_DIM).to(torch_dtype) for _ in range(2))
    cache.fill(float("nan"))
    for layer in range(NUM_LAYERS):
        cache.splice(layer, block_ids, 0, 10, key[layer], value[layer])
    jobs = {KEY: SimpleNamespace(block_ids=block_ids)}
    source = PoolSource(SimpleNamespace(kv_cache=cache), SimpleNamespace(find=jobs.get))
    for layer, start, stop in [(0, 0, 10), (1, 2, 7), (0, 9, 10), (1, 3, 4)]:
        body = source.gather(KEY, Piece(layer, start, stop))
        for view, tensor in ((body.k, key), (body.v, value)):
            assert bytes(view) == tensor[layer, start:stop].contiguous().view(torch.uint8).numpy().tobytes()


def test_gathering_for_a_freed_request_is_our_own_bug():
    source = PoolSource(engine_with(), SimpleNamespace(find=lambda key: None))
    with pytest.raises(AssertionError, match="was freed while its KV was being read"):
        source.gather(KEY, Piece(0, 0, 1))


def test_a_request_from_offer_to_handing_over(role):
    role.add("gw", PrefillRequest(spec("r", 10), TARGET), 0.0)
    assert ends_of(role) == []
    assert calls_of(role) == []
    assert role.load() == Load(0, 1, 0.0, 8, 8, kv_traffic=KvTraffic(num_bytes=5))
    assert role.step()
    assert calls_of(role) == [("open", KEY, TARGET, 10), ("ready", 0, [(KEY, 8)]), ("ready", 1, [(KEY, 8)])]
    assert role.step()
    assert ends_of(role) == [("gw", "r", None)]
    first = ("first_token", KEY, 50, None, {})
    assert calls_of(role) == [("ready", 0, [(KEY, 10)]), ("ready", 1, [(KEY, 10)]), first]
    assert not role.step()
    assert not role.is_empty()
    role.on_transfer(TransferEnded(KEY, TransferOutcome.DONE), 5.0)
    assert ends_of(role) == [("gw", "r", EndReason.HANDED_OVER)]
    assert role.is_empty()
    role.check_integrity()


def test_layers_of_a_request_that_goes_nowhere_are_not_announced(role):
    role.add("gw", PrefillRequest(spec("r", 10), None), 0.0)
    role.flush()
    assert role.step()
    assert calls_of(role) == [("ready", 0, []), ("ready", 1, [])]
    role.step()
    assert ends_of(role) == [("gw", "r", EndReason.LENGTH)]
    assert role.is_empty()


def test_a_cancelled_request_is_aborted_at_the_sender(role):
    role.add("gw", PrefillRequest(spec("r", 10), TARGET), 0.0)
    assert role.step()
    role.flush()
    role.cancel("another", Cancel("r", 0), 1.0)
    assert ends_of(role) == []
    role.cancel("gw", Cancel("r", 0), 1.0)
    assert ends_of(role) == [("gw", "r", EndReason.CANCELLED)]
    assert calls_of(role)[-1] == ("abort", KEY, "cancelled", False)
    role.on_transfer(TransferEnded(KEY, TransferOutcome.ABORTED), 2.0)
    assert role.is_empty()
    role.check_integrity()


@pytest.mark.parametrize(
    "wrong",
    [
        spec("r", 4, logit_bias={100: 1.0}),
        spec("r", 30, max_tokens=3),
        spec("r", 4, max_tokens=2, min_tokens=3),
    ],
    ids=["vocabulary", "length", "min over max"],
)
def test_what_can_never_be_served_is_rejected_before_anything_is_taken(role, wrong):
    role.add("gw", PrefillRequest(wrong, TARGET), 0.0)
    assert ends_of(role) == [("gw", "r", EndReason.REJECTED)]
    assert calls_of(role) == []
    assert role.is_empty()


def test_a_request_for_the_other_role_is_logged_and_dropped(role, caplog):
    role.add("gw", DecodeRequest(spec(), PrefillSource("prefill-0", "g1")), 0.0)
    assert ends_of(role) == []
    assert "sent a DecodeRequest to a prefill worker" in caplog.text


def test_an_event_of_the_other_role_is_our_own_bug(role):
    with pytest.raises(AssertionError):
        role.on_transfer(ReceptionEnded(KEY, ReceptionOutcome.CLOSED), 0.0)


def test_the_witness_hears_of_a_requests_life():
    engine, told = engine_with(), []
    role = PrefillRole(
        engine,
        scheduler_of(engine),
        RecordingSender(),
        clock=lambda: 1.0,
        witness=lambda key, event: told.append((key, event)),
    )
    role.add("gw", PrefillRequest(spec("r", 8), None), 0.0)
    assert role.step()
    events = LifetimeEvent.RECEIVED, LifetimeEvent.SCHEDULED, LifetimeEvent.FIRST_TOKEN, LifetimeEvent.ENDED
    assert told == [(KEY, event) for event in events]
