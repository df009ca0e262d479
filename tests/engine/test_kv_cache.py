"""Token ranges in and out of a pool."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.buffers import as_bytes, from_bytes
from engine.errors import CapacityError
from engine.kv_cache import FLOAT8, SLOTS_KEPT, KvCache, bytes_per_block
from engine.kv_scales import unit_scales
from kernels.reference import ReferenceKernels
from kernels.select import select_kernels
from kvtransfer.worker_facts import KvLayout

CPU = torch.device("cpu")


def make_cache(block_size: int, num_blocks: int, dtype: str = "float32") -> KvCache:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=4, dtype=dtype, block_size=block_size)
    scales = unit_scales(2, 3, CPU) if dtype == FLOAT8 else None
    cache = KvCache(layout, num_blocks, ReferenceKernels(), CPU, scales=scales)
    cache.fill(float("nan"))
    return cache


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_range_travels_between_any_two_block_sizes(data):
    num_tokens = data.draw(st.integers(1, 40))
    source_size, target_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    start = data.draw(st.integers(0, num_tokens - 1))
    stop = data.draw(st.integers(start + 1, num_tokens))
    source_blocks = data.draw(st.permutations(range(-(-num_tokens // source_size))))
    target_blocks = data.draw(st.permutations(range(-(-num_tokens // target_size))))
    source, target = make_cache(source_size, len(source_blocks)), make_cache(target_size, len(target_blocks))
    key, value = torch.randn(num_tokens, 3, 4), torch.randn(num_tokens, 3, 4)

    source.splice(1, source_blocks, 0, num_tokens, key, value)
    gathered = source.gather(1, source_blocks, start, stop)
    assert all(part.is_contiguous() for part in gathered)
    target.splice(1, target_blocks, start, stop, *gathered)
    arrived = target.gather(1, target_blocks, start, stop)

    assert torch.equal(arrived[0], key[start:stop])
    assert torch.equal(arrived[1], value[start:stop])
    written = (~target.layer(1)[0].isnan()).all(-1).all(-1).sum()
    assert written == stop - start, "no slot outside the range is written"
    assert target.layer(0)[0].isnan().all(), "no other layer is written"


@pytest.mark.parametrize("name", ["reference", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layer", "num_layers"), [(0, 5), (0, 1), (1, 3), (3, 2)])
def test_layers_together_are_what_they_are_one_by_one(name, dtype, layer, num_layers):
    kernels = ReferenceKernels() if name == "reference" else select_kernels(name, CPU)
    layout = KvLayout(num_layers=5, num_kv_heads=3, head_dim=8, dtype=dtype, block_size=4)
    source = KvCache(layout, 4, kernels, CPU, with_scratch=True)
    source.fill(0.0)
    for index in range(5):
        for pool in source.layer(index):
            pool.normal_()
    gathered = source.gather(layer, [2, 0, 3], 3, 10, num_layers)
    alone = [source.gather(index, [2, 0, 3], 3, 10) for index in range(layer, layer + num_layers)]
    for part, parts in zip(gathered, zip(*alone, strict=True), strict=True):
        assert part.is_contiguous()
        assert torch.equal(part, torch.cat(parts))

    target = KvCache(structs.replace(layout, block_size=16), 2, kernels, CPU)
    target.fill(float("nan"))
    target.splice(layer, [1], 3, 10, *(part[:, 1:] for part in gathered), head_start=1, num_layers=num_layers)
    for index in range(5):
        for pool, part in zip(target.layer(index), source.gather(index, [2, 0, 3], 3, 10), strict=True):
            is_written = layer <= index < layer + num_layers
            if is_written:
                assert torch.equal(pool[1, 3:10, 1:], part[:, 1:])
            assert (~pool.isnan()).sum() == (7 * 2 * 8 if is_written else 0), "nothing else is written"


def test_more_layers_than_there_are_is_our_own_bug():
    with pytest.raises(AssertionError):
        make_cache(4, 1).gather(1, [0], 0, 2, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FLOAT8])
@pytest.mark.parametrize("copies", [{}, {3: 0}, {1: 0, 2: 0, 4: 3}, {3: 0, 0: 1}])
def test_blocks_are_copied_whole_in_all_layers(dtype, copies):
    """Against the slow way: all sources are kept aside, then block by block and layer by layer."""
    cache = make_cache(block_size=4, num_blocks=5, dtype=dtype)
    cache._pool.view(torch.uint8).random_(0, 120)
    expected = [part.view(torch.uint8).clone() for layer in range(2) for part in cache.layer(layer)]
    sources = [[part[source].clone() for source in copies.values()] for part in expected]
    for part, kept in zip(expected, sources, strict=True):
        for target, content in zip(copies, kept, strict=True):
            part[target] = content
    cache.copy_blocks(copies)
    found = [part.view(torch.uint8) for layer in range(2) for part in cache.layer(layer)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_head_ranges_are_spliced_one_by_one():
    cache = make_cache(block_size=4, num_blocks=2)
    key, value = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    cache.splice(0, [1, 0], 0, 5, key[:, 1:], value[:, 1:], head_start=1)
    assert cache.gather(0, [1, 0], 0, 5)[0][:, 0].isnan().all()
    cache.splice(0, [1, 0], 0, 5, key[:, :1], value[:, :1])
    assert torch.equal(cache.gather(0, [1, 0], 0, 5)[0], key)
    assert torch.equal(cache.gather(0, [1, 0], 0, 5)[1], value)


@pytest.mark.parametrize(
    ("start", "stop", "key_shape", "head_start"),
    [
        (0, 9, (9, 3, 4), 0),  # two blocks of 4 hold 8 tokens
        (3, 3, (0, 3, 4), 0),
        (0, 4, (5, 3, 4), 0),
        (0, 4, (4, 3, 5), 0),
        (0, 4, (4, 2, 4), 2),  # heads 2 and 3 of 3
    ],
)
def test_splices_out_of_bounds_are_our_own_bug(start, stop, key_shape, head_start):
    cache = make_cache(block_size=4, num_blocks=3)
    with pytest.raises(AssertionError):
        cache.splice(0, [0, 1], start, stop, torch.zeros(key_shape), torch.zeros(key_shape), head_start)
    assert cache.layer(0)[0].isnan().all()


def test_another_dtype_is_not_converted_silently():
    with pytest.raises(AssertionError, match="bfloat16"):
        make_cache(4, 1, "bfloat16").splice(0, [0], 0, 2, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))


def test_float8_ranges_travel_as_the_bytes_they_are():
    """All codes, NaN among them, between two pools of different block sizes, by way of the wire's bytes."""
    source, target = (make_cache(block_size, 20, "float8_e4m3fn") for block_size in (4, 16))
    codes = torch.arange(264).to(torch.uint8).reshape(22, 3, 4)
    blocks, target_blocks = [3, 0, 7, 1, 9, 4], [2, 1]
    source.splice(1, blocks, 0, 22, *(x.view(torch.float8_e4m3fn) for x in (codes, codes.flip(0))))
    for start, stop in ((0, 5), (5, 22)):
        parts = source.gather(1, blocks, start, stop)
        sent = [from_bytes(as_bytes(part), part.dtype, tuple(part.shape)) for part in parts]
        target.splice(1, target_blocks, start, stop, *sent)
    key, value = target.gather(1, target_blocks, 0, 22)
    assert torch.equal(key.view(torch.uint8), codes)
    assert torch.equal(value.view(torch.uint8), codes.flip(0))


def test_float8_and_scales_go_together():
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=4, dtype="float8_e4m3fn", block_size=4)
    with pytest.raises(AssertionError, match="float8"):
        KvCache(layout, 3, ReferenceKernels(), CPU)
    with pytest.raises(AssertionError):
        KvCache(layout, 3, ReferenceKernels(), CPU, scales=unit_scales(1, 3, CPU))
    with pytest.raises(AssertionError, match="float32"):
        KvCache(structs.replace(layout, dtype="float32"), 3, ReferenceKernels(), CPU, scales=unit_scales(2, 3, CPU))


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_sizes(dtype, itemsize):
    cache = make_cache(block_size=4, num_blocks=5, dtype=dtype)
    assert bytes_per_block(cache.layout) == 2 * 2 * 4 * 3 * 4 * itemsize
    assert cache.num_bytes == 5 * bytes_per_block(cache.layout)
    assert cache.num_tokens == 20


def test_two_gib_cost_no_time():
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    begin = time.monotonic()
    KvCache(layout, (2 << 30) // bytes_per_block(layout), ReferenceKernels(), CPU)
    assert time.monotonic() - begin < 0.5


def test_memory_that_the_device_does_not_have_is_a_capacity_error():
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    with pytest.raises(CapacityError, match=r"cpu has no .* GiB"):
        KvCache(layout, (1 << 60) // bytes_per_block(layout), ReferenceKernels(), CPU)


def test_slots_are_those_of_the_blocks_that_a_request_has_now():
    """They are remembered, and a request's list of blocks is changed in place."""
    cache, block_ids = make_cache(block_size=2, num_blocks=8), [5, 1]
    for block in range(8):
        key = torch.full((2, 3, 4), float(block))
        cache.splice(0, [block], 0, 2, key, key)
    assert firsts(cache.gather(0, block_ids, 1, 4)) == [5, 1, 1]
    block_ids[:] = [7, 0, 3]
    assert firsts(cache.gather(0, block_ids, 1, 4)) == [7, 0, 0]
    assert firsts(cache.gather(0, block_ids, 1, 6)) == [7, 0, 0, 3, 3]
    assert firsts(cache.gather(0, block_ids, 3, 6)) == [0, 3, 3]
    assert firsts(cache.gather(0, [7, 0, 3, 2], 3, 6)) == [0, 3, 3]


def test_more_ranges_than_are_remembered():
    cache = make_cache(block_size=1, num_blocks=2 * SLOTS_KEPT)
    key = torch.arange(float(2 * SLOTS_KEPT)).view(-1, 1, 1).expand(-1, 3, 4).contiguous()
    cache.splice(0, range(2 * SLOTS_KEPT), 0, 2 * SLOTS_KEPT, key, key)
    for _ in range(2):
        assert [firsts(cache.gather(0, [block], 0, 1)) for block in range(2 * SLOTS_KEPT)] == [
            [block] for block in range(2 * SLOTS_KEPT)
        ]


def firsts(gathered: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """The first number of each token's K."""
    return gathered[0][:, 0, 0].tolist()
