"""The reference kernels against definitions written out naively in float64."""

import math

import pytest
import torch

from kernels.face import RaggedRows
from kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


class PagedCase:
    """Rows of (query length, context length) over a pool that is NaN wherever no token is."""

    def __init__(self, rows, block_size, num_heads, num_kv_heads, seed=0):
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-context // block_size) for _, context in rows]
        num_blocks = sum(widths) + 3
        shuffled = torch.randperm(num_blocks, generator=generator).tolist()
        self.query = torch.randn(sum(q for q, _ in rows), num_heads, HEAD_DIM, generator=generator)
        shape = (num_blocks, block_size, num_kv_heads, HEAD_DIM)
        self.k_pool, self.v_pool = torch.full(shape, math.nan), torch.full(shape, math.nan)
        # What lies behind a row's last block is garbage: a block id far outside of the pool.
        tables = torch.full((len(rows), max(widths) + 2), 1 << 30, dtype=torch.int32)
        self.keys, self.values = [], []
        for index, ((_, context), width) in enumerate(zip(rows, widths, strict=True)):
            blocks, shuffled = shuffled[:width], shuffled[width:]
            tables[index, :width] = torch.tensor(blocks)
            self.keys.append(torch.randn(context, num_kv_heads, HEAD_DIM, generator=generator))
            self.values.append(torch.randn(context, num_kv_heads, HEAD_DIM, generator=generator))
            for position in range(context):
                place = blocks[position // block_size], position % block_size
                self.k_pool[place], self.v_pool[place] = self.keys[-1][position], self.values[-1][position]
        query_lens = tuple(q for q, _ in rows)
        self.rows = RaggedRows(
            query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
            context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
            block_tables=tables,
            host_query_lens=query_lens,
            host_context_lens=tuple(context for _, context in rows),
        )

    def expected(self, window):
        """One query at a time, one head at a time."""
        outputs, token = torch.empty_like(self.query), 0
        group = self.query.shape[1] // self.k_pool.shape[2]
        for query_len, keys, values in zip(self.rows.host_query_lens, self.keys, self.values, strict=True):
            for position in range(len(keys) - query_len, len(keys)):
                first = 0 if window is None else max(0, position + 1 - window)
                for head in range(self.query.shape[1]):
                    seen = keys[first : position + 1, head // group].double()
                    weights = (seen @ self.query[token, head].double() * SCALE).softmax(0)
                    outputs[token, head] = weights @ values[first : position + 1, head // group].double()
                token += 1
        return outputs


@pytest.mark.parametrize("window", [None, 1, 4, 5, 16, 17, 18, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_equals_the_definition(block_size, window):
    case = PagedCase([(1, 1), (3, 3), (5, 17), (1, 16), (4, 33)], block_size, num_heads=4, num_kv_heads=2)
    output = KERNELS.paged_prefill(case.query, case.k_pool, case.v_pool, case.rows, SCALE, window)
    torch.testing.assert_close(output, case.expected(window))


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 33, 34])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_equals_the_definition(block_size, window):
    case = PagedCase([(1, 1), (1, 15), (1, 16), (1, 17), (1, 33)], block_size, num_heads=6, num_kv_heads=2)
    output = KERNELS.paged_decode(case.query, case.k_pool, case.v_pool, case.rows, SCALE, window)
    torch.testing.assert_close(output, case.expected(window))


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8])
def test_grouped_query_ratios(ratio):
    case = PagedCase([(1, 9), (1, 20)], block_size=4, num_heads=2 * ratio, num_kv_heads=2)
    for attend in (KERNELS.paged_decode, KERNELS.paged_prefill):
        output = attend(case.query, case.k_pool, case.v_pool, case.rows, SCALE, None)
        torch.testing.assert_close(output, case.expected(None))


@pytest.mark.parametrize("start", range(10))
def test_a_chunk_at_every_offset(start):
    case = PagedCase([(10 - start, 10)], block_size=4, num_heads=2, num_kv_heads=1)
    output = KERNELS.paged_prefill(case.query, case.k_pool, case.v_pool, case.rows, SCALE, 3)
    torch.testing.assert_close(output, case.expected(3))


def test_a_row_gives_the_same_bits_in_any_batch():
    case = PagedCase([(1, 30), (1, 7), (1, 64)], block_size=16, num_heads=4, num_kv_heads=2)
    together = KERNELS.paged_decode(case.query, case.k_pool, case.v_pool, case.rows, SCALE, None)
    for index, context in enumerate(case.rows.host_context_lens):
        alone = RaggedRows(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=case.rows.context_lens[index : index + 1],
            block_tables=case.rows.block_tables[index : index + 1],
            host_query_lens=(1,),
            host_context_lens=(context,),
        )
        query = case.query[index : index + 1]
        output = KERNELS.paged_decode(query, case.k_pool, case.v_pool, alone, SCALE, None)
        assert torch.equal(output[0], together[index])


def test_rms_norm_and_its_sum():
    x, residual, weight = torch.randn(5, 12), torch.randn(5, 12), torch.randn(12)
    wide = (x + residual).double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected.float())
    assert torch.equal(total, x + residual)
    assert torch.equal(KERNELS.rms_norm(total, weight, 1e-5), normed)


def test_silu_mul_takes_the_gate_from_the_front():
    gate, up = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 5.0]])
    expected = torch.tensor([[3.0 / (1 + math.exp(-1.0)), -10.0 / (1 + math.exp(2.0))]])
    torch.testing.assert_close(KERNELS.silu_mul(torch.cat((gate, up), dim=-1)), expected)


def test_rope_store_rotates_pairs_of_halves_and_writes_by_slot():
    angles = torch.tensor([[0.3, 1.1], [0.6, 2.2]])
    query, key, value = torch.randn(2, 2, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    k_pool, v_pool = torch.full((2, 3, 1, 4), math.nan), torch.full((2, 3, 1, 4), math.nan)
    slots = torch.tensor([4, 0])
    rotated = KERNELS.rope_store(query, key, value, angles.cos(), angles.sin(), k_pool, v_pool, slots)
    turn = torch.polar(torch.ones_like(angles), angles)
    for token, slot in enumerate(slots.tolist()):
        for source, result in ((query[token], rotated[token]), (key[token], k_pool.flatten(0, 1)[slot])):
            turned = torch.complex(source[:, :2], source[:, 2:]) * turn[token]
            torch.testing.assert_close(result, torch.cat((turned.real, turned.imag), dim=-1))
        assert torch.equal(v_pool.flatten(0, 1)[slot], value[token])
    assert k_pool.flatten(0, 1)[[1, 2, 3, 5]].isnan().all(), "only the two slots are written"


def test_gather_and_splice_are_inverse_and_respect_heads():
    k_pool, v_pool = torch.randn(4, 4, 3, 2), torch.randn(4, 4, 3, 2)
    before = k_pool.clone(), v_pool.clone()
    slots = torch.tensor([15, 2, 3, 8])
    key, value = torch.randn(4, 2, 2), torch.randn(4, 2, 2)
    KERNELS.splice_kv(k_pool, v_pool, slots, key, value, head_start=1)
    gathered = KERNELS.gather_kv(k_pool, v_pool, slots)
    for pool, old, new, got in zip((k_pool, v_pool), before, (key, value), gathered, strict=True):
        assert got.is_contiguous()
        assert torch.equal(got[:, 1:], new)
        assert torch.equal(got[:, 0], old.flatten(0, 1)[slots][:, 0]), "head 0 is not part of the range"
        untouched = [slot for slot in range(16) if slot not in slots.tolist()]
        assert torch.equal(pool.flatten(0, 1)[untouched], old.flatten(0, 1)[untouched])
