"""A pool's KV over real sockets into another pool: bit for bit as it is, or in eight bits where both sides agree."""

from types import SimpleNamespace

import pytest
import torch

from decode.worker import PoolSink
from engine.kv_cache import KvCache
from engine.wire_fp8 import dequantise, quantise
from kernels.reference import ReferenceKernels
from kvtransfer import receive_machine as machine_module
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.faults import unwatched
from kvtransfer.frames import TOGETHER_BYTES, FrameMaker, FrameOptions
from kvtransfer.incoming import KvOffered, ReceptionOutcome
from kvtransfer.kv_channel import KvListener
from kvtransfer.kv_messages import KvHello, KvWelcome
from kvtransfer.layout import FP8
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.receiver import KvReceiver
from kvtransfer.send_commands import SenderTiming
from kvtransfer.sender import KvSender
from kvtransfer.worker_facts import KvLayout
from prefill.worker import PoolSource
from tests.kvtransfer.fake_pools import wait_until
from tests.kvtransfer.samples import FINGERPRINT

KEY, PEER, NUM_TOKENS = ("r", 0), ("prefill-0", "g1"), 40
TIMING = SenderTiming(keepalive=5.0, lease=60.0)


def pool(block_size) -> KvCache:
    return KvCache(KvLayout(2, 3, 16, "bfloat16", block_size), 16, ReferenceKernels(), torch.device("cpu"))


def end_of(events: Mailbox):
    found: list = []

    def has_come() -> bool:
        found.extend(events.drain())
        return bool(found)

    wait_until(has_come)
    return found[0]


def transfer(options: FrameOptions, window=4096) -> tuple[KvCache, KvCache, list[int], list[int], int]:
    """One request from pool to pool; both, its blocks in each, and the KV bytes that went over the wire."""
    ours, theirs = pool(4), pool(16)
    our_blocks, their_blocks = list(range(3, 13)), [5, 1, 7]
    dice = torch.Generator().manual_seed(1)
    for layer in range(2):
        k, v = (torch.randn(NUM_TOKENS, 3, 16, generator=dice).to(torch.bfloat16) for _ in "kv")
        ours.splice(layer, our_blocks, 0, NUM_TOKENS, k, v)
    find = lambda blocks: SimpleNamespace(  # noqa: E731
        find=lambda key: SimpleNamespace(block_ids=blocks, witness=unwatched)
    )
    listener, sent, got = KvListener("127.0.0.1", 0), Mailbox(), Mailbox()
    sink = PoolSink(SimpleNamespace(kv_cache=theirs, layout=theirs.layout), find(their_blocks))
    receiver = KvReceiver(listener, (FINGERPRINT, theirs.layout), "g2", sink, ReceiverLimits(window, 30.0), got)
    hello = KvHello(PROTOCOL_VERSION, *PEER, FINGERPRINT, ours.layout)
    sender = KvSender(
        hello, PoolSource(SimpleNamespace(kv_cache=ours), find(our_blocks)), sent, TIMING, options=options
    )
    receiver.start()
    sender.start()
    receiver.expect(KEY, PEER, NUM_TOKENS)
    sender.open(KEY, DecodeTarget("decode-0", "g2", listener.endpoint), NUM_TOKENS)
    assert end_of(got) == KvOffered(KEY)
    receiver.grant(KEY, 0)
    for layer in range(2):
        sender.ready(layer, [(KEY, NUM_TOKENS)])
    sender.first_token(KEY, 7)
    assert end_of(got).outcome is ReceptionOutcome.ARRIVED
    assert end_of(sent).outcome is TransferOutcome.DONE
    num_bytes = receiver.counts.spliced_bytes
    sender.stop()
    receiver.stop()
    sent.close()
    got.close()
    return ours, theirs, our_blocks, their_blocks, num_bytes


@pytest.mark.parametrize("with_checksum", [False, True])
@pytest.mark.parametrize("together_bytes", [0, TOGETHER_BYTES])
def test_by_default_every_bit_arrives(with_checksum, together_bytes):
    options = FrameOptions(with_checksum, together_bytes=together_bytes)
    ours, theirs, our_blocks, their_blocks, num_bytes = transfer(options, window=1 << 20)
    for layer in range(2):
        sides = (ours.gather(layer, our_blocks, 0, NUM_TOKENS), theirs.gather(layer, their_blocks, 0, NUM_TOKENS))
        for here, there in zip(*sides, strict=True):
            assert torch.equal(here, there)
    assert num_bytes == 2 * 2 * NUM_TOKENS * 3 * 16 * 2


@pytest.mark.parametrize("with_checksum", [False, True])
@pytest.mark.parametrize(("window", "together_bytes"), [(1, 0), (4096, 0), (1 << 20, 0), (1 << 20, TOGETHER_BYTES)])
def test_in_eight_bits_the_pool_holds_what_the_round_trip_makes(with_checksum, window, together_bytes):
    options = FrameOptions(with_checksum, FP8, together_bytes)
    ours, theirs, our_blocks, their_blocks, num_bytes = transfer(options, window)
    for layer in range(2):
        sides = (ours.gather(layer, our_blocks, 0, NUM_TOKENS), theirs.gather(layer, their_blocks, 0, NUM_TOKENS))
        for here, there in zip(*sides, strict=True):
            assert torch.equal(dequantise(quantise(here), (NUM_TOKENS, 3, 16), torch.bfloat16), there)
            assert not torch.equal(here, there)
    assert num_bytes == 2 * 2 * NUM_TOKENS * 3 * (16 + 4)


def test_a_receiver_that_does_not_take_it_gets_the_pools_own_dtype(monkeypatch):
    monkeypatch.setattr(machine_module, "FP8", "some other")
    ours, theirs, our_blocks, their_blocks, _ = transfer(FrameOptions(wire_dtype=FP8))
    for layer in range(2):
        assert torch.equal(ours.gather(layer, our_blocks, 0, 40)[0], theirs.gather(layer, their_blocks, 0, 40)[0])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [("bfloat16", 64, FP8), ("float32", 4, FP8), ("bfloat16", 4, None), ("float8_e4m3fn", 64, None)],
)
def test_kv_is_packed_only_where_that_makes_it_smaller(dtype, head_dim, expected):
    layout = KvLayout(2, 3, head_dim, dtype, 16)
    maker = FrameMaker(KvHello(PROTOCOL_VERSION, *PEER, FINGERPRINT, layout), FrameOptions(wire_dtype=FP8))
    assert maker.dtype_for(KvWelcome("g2", (FP8,))) == expected
    assert maker.dtype_for(KvWelcome("g2")) is None
