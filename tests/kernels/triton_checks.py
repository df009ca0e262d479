"""Each Triton kernel against its torch twin. The interpreter runs these checks on a CPU, tests/gpu on a device.

Pools are NaN or Inf wherever no token is, block tables end in garbage, and outputs start as NaN.
"""

import contextlib
import math
import mmap
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.face import KvScales, RaggedRows
from kernels.reference import ReferenceKernels
from kernels.triton_backend.backend import TritonKernels
from kernels.triton_backend.configs import AttentionConfigs, DecodeConfig, PrefillConfig
from kernels.triton_backend.formats import packed, unpacked
from tests.kernels.float8_case import FLOAT8, all_kinds_of_numbers, scales_for, to_codes

REFERENCE = ReferenceKernels()
SMALL = AttentionConfigs(
    DecodeConfig(tile=16, segment=32, num_warps=4, num_stages=1),
    PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=1),
    "many tiles and segments in short rows",
)
GARBAGE = 1 << 30
TOLERANCE = {torch.float32: (2e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 3e-2)}
"""(absolute, relative), of results of size 1. The interpreter cuts bfloat16 off where a device rounds it."""


@dataclass(frozen=True)
class Shape:
    """`rows`: (queries, tokens of the context) of each row. `stored`: the pool's dtype, if it is another one."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 16
    head_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float16
    window: int | None = None
    softcap: float | None = None
    spread: float = 1.0  # size of the queries: large ones give extreme scores
    stored: torch.dtype | None = None

    def __str__(self):
        rows = "+".join(f"{q}of{c}" for q, c in self.rows[:6])
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}"
        stored = f"-KV {str(self.stored).removeprefix('torch.')}" if self.stored else ""
        return f"{rows}-{heads}-block{self.block_size}-{dtype}-window{self.window}-cap{self.softcap}{stored}"


class World:
    """Random queries, and keys and values scattered over a poisoned pool."""

    def __init__(self, shape, device, seed=0):
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-context // shape.block_size) for _, context in shape.rows]
        blocks = torch.randperm(sum(widths) + 3, generator=generator)
        tables = torch.full((len(widths), max(widths) + 2), GARBAGE, dtype=torch.int32)
        pool_shape = (len(blocks), shape.block_size, shape.num_kv_heads, shape.head_dim)
        k_pool, v_pool = torch.full(pool_shape, math.nan), torch.full(pool_shape, math.inf)
        taken = 0
        for index, (width, (_, context)) in enumerate(zip(widths, shape.rows, strict=True)):
            own = blocks[taken : taken + width]
            tables[index, :width] = own
            slots = (own[:, None] * shape.block_size + torch.arange(shape.block_size)).flatten()[:context]
            for pool in (k_pool, v_pool):
                pool.view(-1, *pool_shape[2:])[slots] = torch.randn(context, *pool_shape[2:], generator=generator)
            taken += width
        num_queries = sum(q for q, _ in shape.rows)
        query = torch.randn(num_queries, shape.num_heads, shape.head_dim, generator=generator) * shape.spread
        self.query = query.to(device, shape.dtype)
        self.rows = ragged_rows(shape.rows, tables, device)
        self.scales, self.scale = None, shape.head_dim**-0.5
        if shape.stored == FLOAT8:
            self._quantise(k_pool, v_pool, device)
        else:
            self.k_pool, self.v_pool = (x.to(device, shape.stored or shape.dtype) for x in (k_pool, v_pool))

    def _quantise(self, k_pool, v_pool, device):
        """Stored numbers are about 20; values stand for about 1 in head 0, and scores are about 1 in the last head."""
        scales = scales_for(self.shape.num_kv_heads)
        scales = KvScales(scales.key, scales.value / (20.0 * scales.value[0]))
        self.k_pool = to_codes(k_pool * 20.0 * scales.key[:, None], scales.key).to(device)
        self.v_pool = to_codes(v_pool * 20.0 * scales.value[:, None], scales.value).to(device)
        self.scale /= 20.0 * scales.key[-1].item()
        self.scales = KvScales(scales.key.to(device), scales.value.to(device))

    def arguments(self):
        shape = self.shape
        return self.query, self.k_pool, self.v_pool, self.rows, self.scale, shape.window, shape.softcap, self.scales

    def expected(self, attend):
        """The twin's result in float32 on the same, rounded, operands."""
        query, k_pool, v_pool, *rest = self.arguments()
        if self.scales is None:
            k_pool, v_pool = k_pool.float(), v_pool.float()
        return attend(query.float(), k_pool, v_pool, *rest)

    def alone(self, index):
        """The arguments of one row by itself."""
        query, k_pool, v_pool, rows, *rest = self.arguments()
        begin = sum(rows.host_query_lens[:index])
        single = ragged_rows([self.shape.rows[index]], rows.block_tables[index : index + 1], query.device)
        return query[begin : begin + rows.host_query_lens[index]], k_pool, v_pool, single, *rest


def ragged_rows(rows, tables, device):
    query_lens = tuple(q for q, _ in rows)
    return RaggedRows(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        host_query_lens=query_lens,
        host_context_lens=tuple(context for _, context in rows),
    )


@contextlib.contextmanager
def poisoned_outputs():
    """torch fills what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert torch.empty(1).new_empty(3, dtype=torch.float16).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_near(actual, expected):
    absolute, relative = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=absolute, rtol=relative)


def check_decode(shape, device, configs=SMALL, architecture="sm_80"):
    world = World(shape, device)
    with poisoned_outputs():
        actual = TritonKernels(architecture, configs).paged_decode(*world.arguments())
    assert_near(actual, world.expected(REFERENCE.paged_decode))


def check_prefill(shape, device, configs=SMALL, architecture="sm_80"):
    world = World(shape, device)
    with poisoned_outputs():
        actual = TritonKernels(architecture, configs).paged_prefill(*world.arguments())
    assert_near(actual, world.expected(REFERENCE.paged_prefill))


def _decode(*contexts):
    return tuple((1, context) for context in contexts)


HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS = ((2, 2), (6, 2), (8, 2), (7, 1), (8, 1))
"""(query, KV) heads: ratios 1, 3, 4, 7, 8."""
BLOCK_SIZES = (16, 32, 64, 128, 5)
DTYPES = (torch.float16, torch.float32)

DECODES = (
    # Lengths at the edges of a block, each head size and block size, each ratio of heads.
    *(
        Shape(_decode(1, size - 1, size, size + 1), size, dim, *heads, dtype=DTYPES[index % 2])
        for index, (dim, heads, size) in enumerate(zip(HEAD_DIMS, HEADS, BLOCK_SIZES, strict=True))
    ),
    # At the edges of a tile and of a segment.
    Shape(_decode(31, 32, 33, 63, 64, 65), dtype=torch.float32),
    # Long beside short: more tokens than 64 shortest segments.
    Shape(_decode(4096, 1, 100), block_size=128, num_heads=2, num_kv_heads=1, dtype=torch.float32),
    # Windows: 1, at a block's edges, at the length and next to it, wider.
    *(Shape(_decode(1, 16, 40, 65), window=window) for window in (1, 15, 16, 17, 39, 40, 41, 1000)),
    Shape(_decode(7, 70), softcap=30.0, spread=100.0, dtype=torch.float32),
    Shape(_decode(7, 70), softcap=5.0, window=20),
    # Batches: one row, 64 rows, and more rows than are scanned at a time.
    Shape(_decode(40)),
    Shape(_decode(*(1 + 7 * index % 30 for index in range(64))), num_heads=2, num_kv_heads=1),
    Shape(_decode(*(40 * (index % 43 == 0) for index in range(140))), num_heads=1, num_kv_heads=1, dtype=torch.float32),
    # Rows without tokens, in front, between and behind.
    Shape(_decode(0, 70, 0, 0, 5, 0), dtype=torch.float32),
    Shape(_decode(0, 0), dtype=torch.float32),
)
PREFILLS = (
    # Without a prefix, with a part of one, with all but the last token computed; each head and block size.
    *(
        Shape(((3, 3), (5, size + 2), (1, size)), size, dim, *heads, dtype=DTYPES[index % 2])
        for index, (dim, heads, size) in enumerate(zip(HEAD_DIMS, HEADS, BLOCK_SIZES, strict=True))
    ),
    Shape(((2, 2048),), block_size=128, num_heads=2, num_kv_heads=1, dtype=torch.float32),
    # Many short rows: tiles are found by their row.
    Shape(tuple((1 + index % 5, 1 + index % 5 + index) for index in range(20)), num_heads=3, num_kv_heads=1),
    *(Shape(((20, 50), (16, 16), (7, 40)), window=window, dtype=torch.float32) for window in (1, 15, 16, 17, 31, 49)),
    Shape(((20, 50), (33, 33)), window=1000),
    Shape(((9, 40),), softcap=30.0, spread=100.0, dtype=torch.float32),
    Shape(((9, 40),), softcap=5.0, window=12),
)
CHUNK_OFFSETS = tuple(
    Shape(((33 - start, 33),), window=window, num_heads=2, num_kv_heads=1, dtype=torch.float32)
    for start in range(0, 33, 4)
    for window in (None, 18)
)


CONVERSIONS = ((torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.bfloat16))
"""(dtype of the queries, that of the pool)."""
STORED_DECODES = (
    *(replace(shape, stored=FLOAT8) for shape in DECODES[:6]),
    Shape(_decode(1, 16, 40, 65), window=17, stored=FLOAT8),
    Shape(_decode(7, 70), softcap=30.0, spread=100.0, dtype=torch.float32, stored=FLOAT8),
    Shape(_decode(0, 70, 0, 0, 5, 0), dtype=torch.float32, stored=FLOAT8),
    *(Shape(_decode(1, 33, 100), dtype=dtype, stored=stored) for dtype, stored in CONVERSIONS),
)
STORED_PREFILLS = (
    *(replace(shape, stored=FLOAT8) for shape in PREFILLS[:5]),
    Shape(((20, 50), (16, 16), (7, 40)), window=17, dtype=torch.float32, stored=FLOAT8),
    Shape(((9, 40),), softcap=5.0, window=12, stored=FLOAT8),
    *(Shape(((20, 50), (16, 16)), dtype=dtype, stored=stored) for dtype, stored in CONVERSIONS),
)


def check_rows_have_the_same_bits_in_any_batch(device):
    world = World(Shape(((1, 30), (1, 7), (1, 100)), dtype=torch.float16), device)
    for attend in (TritonKernels("sm_80", SMALL).paged_decode, TritonKernels("sm_80", SMALL).paged_prefill):
        together = attend(*world.arguments())
        for index in range(3):
            assert torch.equal(attend(*world.alone(index))[0], together[index])


def check_any_number_of_programs_gives_the_same_bits(device):
    world = World(Shape(_decode(30, 7, 0, 100), dtype=torch.float16), device)
    alone = replace(SMALL, decode=replace(SMALL.decode, programs=1))
    many, one = (TritonKernels("sm_80", configs).paged_decode(*world.arguments()) for configs in (SMALL, alone))
    assert torch.equal(many, one)


def check_result_is_the_kernels_own(device):
    """The negative control: a wrong operand shows."""
    world = World(Shape(_decode(40)), device)
    expected = world.expected(REFERENCE.paged_decode)
    world.v_pool[world.rows.block_tables[0, 0], 3] += 1.0
    actual = TritonKernels("sm_80", SMALL).paged_decode(*world.arguments())
    absolute, relative = TOLERANCE[actual.dtype]
    assert not torch.allclose(actual.float(), expected, atol=absolute, rtol=relative)


def far_pool(dtype, num_blocks, block_size, num_kv_heads, head_dim):
    """A pool of any size on the CPU whose memory is only lent when it is touched, even where memory is short."""
    count = num_blocks * block_size * num_kv_heads * head_dim
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap does not name
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype).view(num_blocks, block_size, num_kv_heads, head_dim)


def check_offsets_past_32_bits(make_pool, device):
    """Slots past 2**31 elements, through every kernel that addresses a pool."""
    dtype, block_size, heads, dim = torch.float16, 128, 8, 256
    num_blocks = (1 << 31) // (block_size * heads * dim) + 40
    far = num_blocks - 2
    assert far * block_size * heads * dim > 1 << 31
    k_pool = make_pool(dtype, num_blocks, block_size, heads, dim)
    v_pool = make_pool(dtype, num_blocks, block_size, heads, dim)
    kernels, slots = TritonKernels("sm_80", SMALL), far * block_size + torch.arange(3, device=device)
    query, key, value = (torch.randn(3, heads, dim, device=device).to(dtype) for _ in range(3))
    kernels.splice_kv(k_pool, v_pool, slots, key, value, 0)
    near_k, near_v = k_pool[far:].clone(), v_pool[far:].clone()
    assert torch.equal(near_k[0, :3], key)
    assert all(torch.equal(*pair) for pair in zip(kernels.gather_kv(k_pool, v_pool, slots), (key, value), strict=True))
    far_rows = ragged_rows([(1, 3)], torch.tensor([[far]], dtype=torch.int32), device)
    near_rows = ragged_rows([(1, 3)], torch.zeros(1, 1, dtype=torch.int32), device)
    for name in ("paged_decode", "paged_prefill"):
        actual = getattr(kernels, name)(query[:1], k_pool, v_pool, far_rows, 0.1, None)
        assert_near(actual, getattr(REFERENCE, name)(query[:1], near_k, near_v, near_rows, 0.1, None))
    angles = torch.zeros(3, dim // 2, device=device)
    kernels.rope_store(query, value, key, angles.cos(), angles.sin(), k_pool, v_pool, slots)
    assert torch.equal(k_pool[far, :3], value)
    assert torch.equal(v_pool[far, :3], key)


def check_rope_store(head_dim, num_heads, num_kv_heads, dtype, device, stored=None):
    """Query, key and value as the slices of one projection that the model passes."""
    scales = scales_for(num_kv_heads, device) if stored == FLOAT8 else None
    fused = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    parts = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = torch.randn(5, head_dim // 2, device=device)
    slots = torch.tensor([17, 0, 3, 30, 16], device=device)
    pools, results = [], []
    for kernels in (REFERENCE, TritonKernels("sm_80")):
        pool = torch.full((2, 2, 16, num_kv_heads, head_dim), math.nan, device=device).to(stored or dtype)
        with poisoned_outputs():
            results.append(kernels.rope_store(*parts, angles.cos(), angles.sin(), *pool, slots, scales))
        pools.append(pool.float() if stored else pool)
    torch.testing.assert_close(results[1], results[0])
    if stored == FLOAT8:
        # A device may contract a rotation, and a number beside a tie then goes to the next code: 1/8 of it at most.
        torch.testing.assert_close(pools[1], pools[0], equal_nan=True, rtol=0.13, atol=2**-9)
        differing = (pools[1] != pools[0])[~pools[0].isnan()].float().mean()
        assert differing < (0.1 if dtype == torch.bfloat16 else 1e-3), "bfloat16 is cut off by the interpreter"
        assert (pools[0].abs() == 448.0).any(), "some numbers must saturate"
    else:
        absolute, relative = TOLERANCE[stored] if stored else (None, None)
        torch.testing.assert_close(pools[1], pools[0], equal_nan=True, atol=absolute, rtol=relative)


def check_moves(num_tokens, num_kv_heads, head_dim, heads, head_start, dtype, device):
    """gather_kv of all heads, splice_kv of some of them from a strided buffer."""
    as_bytes = (lambda x: x.view(torch.uint8)) if dtype == FLOAT8 else (lambda x: x)
    pools = torch.randn(2, 9, 16, num_kv_heads, head_dim).to(device, dtype)
    slots = torch.randperm(9 * 16)[:num_tokens].to(device)
    wide = torch.randn(num_tokens, 2, heads, head_dim).to(device, dtype)
    kernels, expected = TritonKernels("sm_80"), pools.clone()
    with poisoned_outputs():
        gathered = kernels.gather_kv(*pools, slots)
    for actual, twin in zip(gathered, REFERENCE.gather_kv(*pools, slots), strict=True):
        assert torch.equal(as_bytes(actual), as_bytes(twin))
    kernels.splice_kv(*pools, slots, wide[:, 0], wide[:, 1], head_start)
    REFERENCE.splice_kv(*expected, slots, wide[:, 0], wide[:, 1], head_start)
    assert torch.equal(as_bytes(pools), as_bytes(expected))


@triton.jit
def _pack_kernel(codes, numbers, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes + at, packed(tl.load(numbers + at), tl.uint8, 448.0))


@triton.jit
def _unpack_kernel(numbers, codes, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(numbers + at, unpacked(tl.load(codes + at), numbers.dtype.element_ty))


def check_every_code_is_read(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    numbers = torch.empty(256, dtype=dtype, device=device)
    _unpack_kernel[(1,)](numbers, codes, N=256)
    expected = codes.view(FLOAT8).float()
    assert torch.equal(numbers.isnan(), expected.isnan())
    assert torch.equal(numbers.float().nan_to_num(), expected.nan_to_num())


def check_codes_are_those_of_torch(device):
    """Exactly: the nearest, an even one of two, at most 448, NaN for NaN, -0 for -0."""
    numbers = all_kinds_of_numbers()
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 1024)])
    codes = torch.empty(len(numbers), dtype=torch.uint8, device=device)
    _pack_kernel[(len(numbers) // 1024,)](codes, numbers.to(device), N=1024)
    expected = numbers.clamp(-448.0, 448.0).to(FLOAT8)
    codes = codes.cpu()
    assert torch.equal(codes.view(FLOAT8).float().isnan(), numbers.isnan())
    assert torch.equal(codes[~numbers.isnan()], expected.view(torch.uint8)[~numbers.isnan()])


def check_elementwise(num_rows, size, dtype, device):
    """Norms of rows and of heads in a fused projection, with and without a residual; the activation."""
    kernels = TritonKernels("sm_80")
    x, residual, weight, fused = (
        torch.randn(*shape).to(device, dtype)
        for shape in ((num_rows, size), (num_rows, size), (size,), (num_rows, 5, size))
    )
    for argument in (x, fused[:, 1:4], x[0]):
        with poisoned_outputs():
            actual = kernels.rms_norm(argument, weight, 1e-5)
        assert_near(actual, REFERENCE.rms_norm(argument, weight, 1e-5))
    with poisoned_outputs():
        normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
        activated = kernels.silu_mul(torch.cat((x, residual), dim=-1))
    expected_normed, expected_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(total, expected_total)
    assert_near(normed, expected_normed)
    assert_near(activated, REFERENCE.silu_mul(torch.cat((x, residual), dim=-1)))


ROPES = ((64, 9, 3, torch.float16), (80, 2, 2, torch.float32), (96, 8, 2, torch.bfloat16), (256, 17, 1, torch.float32))
"""(head_dim, query heads, KV heads, dtype)."""
STORED_ROPES = (
    *((*shape, FLOAT8) for shape in ROPES),
    (64, 9, 3, torch.float32, torch.bfloat16),
    (64, 9, 3, torch.float32, torch.float16),
)
"""The same, and the pool's dtype."""
MOVES = (
    (1, 2, 64, 2, 0, torch.bfloat16),
    (70, 3, 80, 1, 1, torch.float16),
    (33, 8, 256, 4, 4, torch.bfloat16),
    (5, 3, 96, 2, 1, torch.float32),
    (41, 5, 64, 3, 1, FLOAT8),
)
"""(tokens, KV heads, head_dim, heads moved, the first of them, dtype)."""
ELEMENTWISE = ((1, 64, torch.float32), (5, 80, torch.float16), (3, 576, torch.bfloat16), (2, 4096, torch.float32))
"""(rows, columns, dtype)."""
