"""The decode role without a model: KV bytes into a paged pool, and the scheduler's commands to the receiver."""

from types import SimpleNamespace

import pytest
import torch

from decode.scheduler import DecodeLimits, DecodeScheduler
from decode.worker import DecodeRole, PoolSink
from engine.block_pool import BlockPool
from engine.buffers import as_bytes
from engine.kv_cache import KvCache
from engine.queue_rules import QueueRules
from engine.request import StepResult
from kernels.reference import ReferenceKernels
from kvtransfer.faults import unwatched
from kvtransfer.incoming import KvOffered, ReceptionEnded, ReceptionOutcome
from kvtransfer.kv_messages import KvHeader
from kvtransfer.layout import KvBody
from kvtransfer.messages import Cancel, DecodeRequest, PrefillRequest, PrefillSource
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import EndReason, LifetimeEvent
from kvtransfer.worker_facts import KvLayout, KvTraffic
from tests.kvtransfer.samples import FINGERPRINT, spec

KEY, PEER = ("r", 0), ("prefill-0", "g1")
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 4


class RecordingReceiver:
    """In place of KvReceiver: keeps what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list = []
        self.traffic = KvTraffic(num_bytes=5)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


class FakeRunner:
    """Computes nothing and samples 60 for every row."""

    def step(self, rows):
        return StepResult([60] * len(rows))


def engine_with(block_size=4, dtype="float32", num_blocks=8):
    layout = KvLayout(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype, block_size)
    kv_cache = KvCache(layout, num_blocks, ReferenceKernels(), torch.device("cpu"))
    return SimpleNamespace(
        kv_cache=kv_cache,
        pool=BlockPool(num_blocks, block_size),
        layout=layout,
        fingerprint=FINGERPRINT,
        max_model_len=64,
        runner=FakeRunner(),
    )


@pytest.fixture
def role():
    engine = engine_with()
    scheduler = DecodeScheduler(engine.pool, QueueRules(8), DecodeLimits(8, 4, 64, 10.0, 100.0, 100.0), frozenset({1}))
    return DecodeRole(engine, scheduler, RecordingReceiver())


def calls_of(role) -> list:
    calls, role._receiver.calls = role._receiver.calls, []
    return calls


def outputs_of(role) -> list:
    return [
        (gateway, output.start, output.token_ids, output.end and output.end.reason)
        for gateway, output in role.flush()
        if output.token_ids or output.end  # and not a notice that a request has its room
    ]


def tensors(dtype, num_tokens=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, num_tokens, NUM_HEADS, HEAD_DIM)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


def frame(layer, start, stop, key, value, heads=(0, NUM_HEADS)) -> tuple[KvHeader, KvBody]:
    """As it comes off the wire: bytes that are nobody else's."""
    k, v = (
        memoryview(bytearray(as_bytes(part[layer, start:stop, heads[0] : heads[1]].contiguous())))
        for part in (key, value)
    )
    return KvHeader(*KEY, layer, start, stop, *heads, str(key.dtype).removeprefix("torch.")), KvBody(k, v)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spliced_bytes_are_the_tokens_in_order_and_touch_nothing_else(block_size, dtype):
    engine = engine_with(block_size, dtype, num_blocks=16)
    block_ids = list(reversed(range(16)))[: -(-10 // block_size)]
    key, value = tensors(getattr(torch, dtype))
    engine.kv_cache.fill(7.0)
    jobs = {KEY: SimpleNamespace(block_ids=block_ids, witness=unwatched)}
    sink = PoolSink(engine, SimpleNamespace(find=jobs.get))
    for layer in range(NUM_LAYERS):
        for start, stop in [(0, 1), (1, 6), (6, 10)]:
            sink.splice(KEY, *frame(layer, start, stop, key, value))
    sink.finish(KEY)
    for layer in range(NUM_LAYERS):
        k, v = engine.kv_cache.gather(layer, block_ids, 0, 10)
        assert torch.equal(k, key[layer])
        assert torch.equal(v, value[layer])
    written = NUM_LAYERS * 2 * 10 * NUM_HEADS * HEAD_DIM
    assert int((engine.kv_cache._pool != 7.0).sum()) == written


def test_some_heads_of_a_token_can_be_spliced():
    engine = engine_with()
    key, value = tensors(torch.float32)
    sink = PoolSink(engine, SimpleNamespace(find={KEY: SimpleNamespace(block_ids=[3, 1, 2], witness=unwatched)}.get))
    for heads in ((1, 2), (0, 1)):
        sink.splice(KEY, *frame(0, 0, 10, key, value, heads))
    k, v = engine.kv_cache.gather(0, [3, 1, 2], 0, 10)
    assert torch.equal(k, key[0])
    assert torch.equal(v, value[0])


def test_splicing_for_a_freed_request_is_our_own_bug():
    sink = PoolSink(engine_with(), SimpleNamespace(find=lambda key: None))
    with pytest.raises(AssertionError, match="was freed while its KV was being written"):
        sink.splice(KEY, *frame(0, 0, 1, *tensors(torch.float32)))


def test_a_request_from_reservation_to_its_end(role):
    role.add("gw", DecodeRequest(spec("r", 6, max_tokens=3), PrefillSource(*PEER)), 0.0)
    assert outputs_of(role) == []
    assert calls_of(role) == [("expect", KEY, PEER, 6)]
    role.on_transfer(KvOffered(KEY), 0.5)
    assert outputs_of(role) == []
    assert calls_of(role) == [("grant", KEY, 0)]
    assert not role.step()
    role.on_transfer(ReceptionEnded(KEY, ReceptionOutcome.ARRIVED, 50), 1.0)
    assert role.step()
    assert outputs_of(role) == [("gw", 0, (50, 60), None)]
    assert role.step()
    assert outputs_of(role) == [("gw", 2, (60,), EndReason.LENGTH)]
    assert not role.step()
    assert role.is_empty()
    role.check_integrity()


def test_a_resumed_request_expects_the_kv_of_its_output_too(role):
    role.add("gw", DecodeRequest(spec("r", 6, max_tokens=5, resumed=[20, 21]), PrefillSource(*PEER)), 0.0)
    role.flush()
    assert calls_of(role) == [("expect", KEY, PEER, 8)]
    role.on_transfer(KvOffered(KEY), 0.5)
    role.flush()
    assert calls_of(role) == [("grant", KEY, 0)]
    role.on_transfer(ReceptionEnded(KEY, ReceptionOutcome.ARRIVED, 50), 1.0)
    assert role.step()
    assert outputs_of(role) == [("gw", 2, (50, 60), None)]


def test_a_cancelled_request_is_closed_at_the_receiver(role):
    role.add("gw", DecodeRequest(spec("r", 6), PrefillSource(*PEER)), 0.0)
    role.flush()
    role.cancel("another", Cancel("r", 0), 1.0)
    assert outputs_of(role) == []
    role.cancel("gw", Cancel("r", 0), 1.0)
    assert outputs_of(role) == [("gw", 0, (), EndReason.CANCELLED)]
    assert calls_of(role)[-1] == ("close", KEY, "cancelled")
    assert not role.is_empty()
    role.on_transfer(ReceptionEnded(KEY, ReceptionOutcome.CLOSED), 2.0)
    assert role.is_empty()
    role.check_integrity()


def test_what_can_never_fit_is_rejected(role):
    role.add("gw", DecodeRequest(spec("r", 30, max_tokens=4), PrefillSource(*PEER)), 0.0)
    assert outputs_of(role) == [("gw", 0, (), EndReason.REJECTED)]
    assert calls_of(role) == []
    assert role.is_empty()


def test_a_request_for_the_other_role_is_logged_and_dropped(role, caplog):
    role.add("gw", PrefillRequest(spec(), None), 0.0)
    assert outputs_of(role) == []
    assert "sent a PrefillRequest to a decode worker" in caplog.text


def test_an_event_of_the_other_role_is_our_own_bug(role):
    with pytest.raises(AssertionError):
        role.on_transfer(TransferEnded(KEY, TransferOutcome.DONE), 0.0)


def test_the_witness_hears_of_the_first_frame_when_it_comes():
    engine, told = engine_with(), []
    scheduler = DecodeScheduler(engine.pool, QueueRules(8), DecodeLimits(8, 4, 64, 10.0, 100.0, 100.0), frozenset({1}))
    role = DecodeRole(
        engine, scheduler, RecordingReceiver(), clock=lambda: 0.0, witness=lambda key, event: told.append(event)
    )
    role.add("gw", DecodeRequest(spec("r", 10), PrefillSource(*PEER)), 0.0)
    role.on_transfer(KvOffered(KEY), 0.0)
    PoolSink(engine, scheduler).splice(KEY, *frame(0, 0, 1, *tensors(torch.float32)))
    assert told == [
        LifetimeEvent.RECEIVED,
        LifetimeEvent.OFFERED,
        LifetimeEvent.RESERVED,
        LifetimeEvent.FIRST_FRAME,
    ]
