"""Staging without a device: the bytes of the slow twins, buffers that are never taken from under somebody's feet."""

import gc
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from decode.staged_sink import StagedSink
from decode.worker import PoolSink
from engine.kv_cache import KvCache
from engine.staging import BufferRing, LentBuffers
from kernels.reference import ReferenceKernels
from kvtransfer.faults import unwatched
from kvtransfer.kv_messages import KvHeader
from kvtransfer.layout import FP8, KvBody
from kvtransfer.outgoing import Piece
from kvtransfer.worker_facts import KvLayout
from prefill import staged_source as source_module
from prefill.staged_source import StagedSource
from prefill.worker import PoolSource, PrefillRole
from tests.engine.fake_lane import FakeLane

KEY, NUM_TOKENS = ("r", 0), 20
BLOCKS = [5, 1, 7, 2, 4]


def engine(dtype="bfloat16", fill=True):
    cache = KvCache(KvLayout(2, 3, 16, dtype, 4), 8, ReferenceKernels(), torch.device("cpu"))
    cache.fill(0.0)
    if fill:
        dice = torch.Generator().manual_seed(1)
        for layer in range(2):
            k, v = (torch.randn(NUM_TOKENS, 3, 16, generator=dice).to(cache.layer(0)[0].dtype) for _ in "kv")
            cache.splice(layer, BLOCKS, 0, NUM_TOKENS, k, v)
    return SimpleNamespace(kv_cache=cache, layout=cache.layout)


JOBS = SimpleNamespace(find=lambda key: SimpleNamespace(block_ids=BLOCKS, witness=unwatched))
PIECES = [Piece(0, 0, 20), Piece(1, 3, 9), Piece(0, 19, 20), Piece(1, 0, 20, FP8), Piece(0, 7, 8, FP8)]


# --- prefill


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("piece", PIECES)
def test_a_staged_source_gives_its_twins_bytes(dtype, piece):
    made = engine(dtype)
    staged, twin = StagedSource(made, JOBS, FakeLane()), PoolSource(made, JOBS)
    staged.mark_layer(piece.layer)
    found, wanted = staged.gather(KEY, piece), twin.gather(KEY, piece)
    assert (bytes(found.k), bytes(found.v)) == (bytes(wanted.k), bytes(wanted.v))


def test_a_gather_follows_its_layers_last_mark_and_waits_for_the_lane_at_the_end():
    lane = FakeLane()
    staged = StagedSource(engine(), JOBS, lane)
    for layer in (0, 1, 0):
        staged.mark_layer(layer)
    staged.gather(KEY, Piece(1, 0, 4))
    staged.gather(KEY, Piece(0, 0, 4))
    assert lane.log == [
        *(("follows", "mark 2"), ("recorded", 1), ("waited for", 1)),
        *(("follows", "mark 3"), ("recorded", 2), ("waited for", 2)),
    ]


def test_bodies_that_are_still_held_are_not_written_over_and_those_that_are_not_come_back(monkeypatch):
    monkeypatch.setattr(source_module, "NUM_BUFFERS", 4)
    made, lane = engine(), FakeLane()
    staged, twin = StagedSource(made, JOBS, lane), PoolSource(made, JOBS)
    pieces = [Piece(layer, start, start + 4) for layer in (0, 1) for start in range(0, 20, 4)]
    for layer in (0, 1):
        staged.mark_layer(layer)
    held = [staged.gather(KEY, piece) for piece in pieces]
    assert len(lane.buffers) == 4 < 2 * len(held), "most of these had to go elsewhere"
    for body, piece in zip(held, pieces, strict=True):
        wanted = twin.gather(KEY, piece)
        assert (bytes(body.k), bytes(body.v)) == (bytes(wanted.k), bytes(wanted.v))
    assert staged._buffers.num_free == 0
    del held, body
    gc.collect()
    assert staged._buffers.num_free == 4


def test_a_buffer_comes_back_when_the_last_view_of_it_is_gone_from_whatever_thread():
    lent = LentBuffers(FakeLane(), 1, 64)
    views = [lent.lend(10)]
    views.append(views[0][2:4])
    assert (len(views[0]), lent.num_free) == (10, 0)
    elsewhere = lent.lend(64)
    del views[0]
    assert lent.num_free == 0
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert lent.num_free == 1
    del elsewhere
    assert lent.num_free == 1, "what was made for want of a buffer is not kept"


def test_each_layer_is_marked_before_the_sender_is_told():
    told: list = []
    sender = SimpleNamespace(ready=lambda layer, stops: told.append(("ready", layer)))
    mark_layer = lambda layer: told.append(("mark", layer))  # noqa: E731
    role = PrefillRole(SimpleNamespace(), SimpleNamespace(), sender, mark_layer=mark_layer)
    on_layer = role._announcer([])
    for layer in (0, 1):
        on_layer(layer)
    assert told == [("mark", 0), ("ready", 0), ("mark", 1), ("ready", 1)]


# --- decode


def frames(dtype):
    source = PoolSource(engine(dtype), JOBS)
    for piece in PIECES[:2] + PIECES[3:]:
        body = source.gather(KEY, piece)
        name = piece.dtype or dtype
        yield KvHeader(*KEY, piece.layer, piece.start, piece.stop, 0, 3, name), body


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_staged_sink_writes_what_its_twin_writes(dtype):
    ours, theirs = engine(dtype, fill=False), engine(dtype, fill=False)
    staged, twin = StagedSink(ours, JOBS, FakeLane()), PoolSink(theirs, JOBS)
    for header, body in frames(dtype):
        for sink in (staged, twin):
            sink.splice(KEY, header, body)
        for layer in range(2):
            for here, there in zip(ours.kv_cache.layer(layer), theirs.kv_cache.layer(layer), strict=True):
                assert torch.equal(here, there)
    for sink in (staged, twin):
        sink.finish(KEY)
    assert ours.kv_cache.layer(0)[0].any()


def test_some_heads_can_be_spliced():
    ours = engine(fill=False)
    staged = StagedSink(ours, JOBS, FakeLane())
    part = torch.ones(4, 1, 16, dtype=torch.bfloat16).view(torch.uint8).reshape(-1).numpy().data
    staged.splice(KEY, KvHeader(*KEY, 1, 0, 4, 2, 3, "bfloat16"), KvBody(part, part))
    k, v = ours.kv_cache.gather(1, BLOCKS, 0, 4)
    assert bool((k[:, 2] == 1).all())
    assert bool((v[:, 2] == 1).all())
    assert not k[:, :2].any()


def test_a_buffer_is_filled_again_only_when_its_last_use_is_over():
    lane = FakeLane()
    ring = BufferRing(lane, 2, 8)
    for number in range(5):
        view = ring.fill(memoryview(bytearray([number] * 4)))
        assert view.tolist() == [number] * 4
        ring.used()
    assert lane.log == [
        *(("recorded", 1), ("recorded", 2)),
        *(("waited for", 1), ("recorded", 3)),
        *(("waited for", 2), ("recorded", 4)),
        *(("waited for", 3), ("recorded", 5)),
    ]


def test_what_has_arrived_is_there_before_it_is_said_to_be():
    lane = FakeLane()
    staged = StagedSink(engine(fill=False), JOBS, lane)
    for header, body in frames("bfloat16"):
        staged.splice(KEY, header, body)
    staged.finish(KEY)
    recorded = [number for what, number in lane.log if what == "recorded"]
    assert lane.log[-1] == ("waited for", recorded[-1])
    assert recorded == list(itertools.islice(itertools.count(1), len(recorded)))


def test_nothing_moves_for_a_freed_request():
    nobody = SimpleNamespace(find=lambda key: None)
    with pytest.raises(AssertionError, match="was freed while its KV was being read"):
        StagedSource(engine(), nobody, FakeLane()).gather(KEY, Piece(0, 0, 1))
    header, body = next(frames("bfloat16"))
    with pytest.raises(AssertionError, match="was freed while its KV was being written"):
        StagedSink(engine(), nobody, FakeLane()).splice(KEY, header, body)
