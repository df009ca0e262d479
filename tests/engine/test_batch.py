"""The layout of a ragged batch."""

import pytest
import torch

from engine.batch import build_batch, slots_of
from engine.request import ScheduledRow
from tests.engine.greedy_loop import make_request

CPU = torch.device("cpu")


def test_rows_of_one_token_come_first_and_everything_follows_them():
    chunk = make_request("chunk", range(100, 110), [5, 2, 7])
    single = make_request("single", range(200, 206), [3, 1])
    whole = make_request("whole", range(30, 33), [0])
    rows = [ScheduledRow(chunk, 3, 4), ScheduledRow(single, 5, 1), ScheduledRow(whole, 0, 3)]
    batch = build_batch(rows, block_size=4, device=CPU)

    assert batch.token_ids.tolist() == [205, 103, 104, 105, 106, 30, 31, 32]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [1 * 4 + 1, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2, 0, 1, 2]
    assert batch.num_decode == 1
    assert batch.decode.query_start.tolist() == [0, 1]
    assert batch.decode.context_lens.tolist() == [6]
    assert batch.decode.block_tables.tolist() == [[3, 1]]
    assert batch.prefill.query_start.tolist() == [0, 4, 7]
    assert batch.prefill.context_lens.tolist() == [7, 3]
    assert batch.prefill.block_tables[:, :1].tolist() == [[5], [0]]
    assert batch.prefill.block_tables[0].tolist() == [5, 2]
    assert batch.prefill.host_query_lens == (4, 3)


def test_rows_that_sample_keep_the_order_of_the_rows():
    chunk = make_request("chunk", range(100, 110), [5, 2, 7])
    single = make_request("single", range(200, 206), [3, 1])
    whole = make_request("whole", range(30, 33), [0])
    rows = [ScheduledRow(whole, 0, 3), ScheduledRow(chunk, 3, 4), ScheduledRow(single, 5, 1)]
    batch = build_batch(rows, block_size=4, device=CPU)
    assert batch.sample_rows == (0, 2)
    assert batch.token_ids[batch.sample_tokens].tolist() == [32, 205]


def test_a_row_spans_prompt_and_output():
    request = make_request("a", [7, 8, 9], [1, 0])
    request.output_token_ids.extend([20, 21])
    batch = build_batch([ScheduledRow(request, 1, 4)], block_size=3, device=CPU)
    assert batch.token_ids.tolist() == [8, 9, 20, 21]
    assert batch.slot_mapping.tolist() == [4, 5, 0, 1]
    assert batch.sample_rows == (0,)
    assert batch.decode is None


def test_a_row_of_no_tokens_draws_from_the_row_before_it():
    chunk = make_request("chunk", range(100, 106), [5, 2])
    lone = make_request("lone", [7], [0])
    single = make_request("single", range(200, 206), [3, 1])
    follower, second = make_request("follower", range(100, 106), []), make_request("second", range(100, 106), [])
    rows = [ScheduledRow(chunk, 4, 2), ScheduledRow(follower, 6, 0), ScheduledRow(second, 6, 0)]
    rows += [ScheduledRow(single, 5, 1), ScheduledRow(lone, 0, 1), ScheduledRow(make_request("x", [7], []), 1, 0)]
    batch = build_batch(rows, block_size=4, device=CPU)
    assert batch.token_ids.tolist() == [205, 7, 104, 105]
    assert batch.sample_rows == (0, 1, 2, 3, 4, 5)
    assert batch.token_ids[batch.sample_tokens].tolist() == [105, 105, 105, 205, 7, 7]
    assert not batch.all_sample


def test_as_many_draws_as_tokens_need_not_be_one_of_each():
    """Two tokens and two draws, both from the second one."""
    rows = [ScheduledRow(make_request("a", [7, 8], [0]), 0, 2), ScheduledRow(make_request("b", [7, 8], []), 2, 0)]
    batch = build_batch(rows, block_size=4, device=CPU)
    assert batch.sample_tokens.tolist() == [1, 1]
    assert not batch.all_sample
    rows = [ScheduledRow(make_request("a", [7], [0]), 0, 1), ScheduledRow(make_request("b", [7], []), 1, 0)]
    batch = build_batch([*rows, ScheduledRow(make_request("c", [8, 9], [1]), 0, 1)], block_size=4, device=CPU)
    assert batch.sample_tokens.tolist() == [0, 0]
    assert not batch.all_sample
    assert build_batch(rows[:1], block_size=4, device=CPU).all_sample


def test_a_batch_where_nothing_samples():
    batch = build_batch([ScheduledRow(make_request("a", range(9), [0, 1]), 2, 1)], block_size=8, device=CPU)
    assert batch.sample_rows == ()
    assert batch.sample_tokens.shape == (0,)
    assert batch.prefill is None


def test_slots_do_not_wrap_at_32_bits():
    block_id = (1 << 31) // 16 + 5
    assert slots_of([block_id], 3, 5, block_size=16).tolist() == [block_id * 16 + 3, block_id * 16 + 4]


@pytest.mark.parametrize(("start", "count"), [(0, 0), (0, 11), (9, 2)])
def test_rows_beyond_the_known_tokens_are_our_own_bug(start, count):
    with pytest.raises(AssertionError):
        build_batch([ScheduledRow(make_request("a", range(10), [0, 1]), start, count)], block_size=16, device=CPU)


def test_too_few_blocks_are_our_own_bug():
    with pytest.raises(AssertionError, match="blocks for 8"):
        build_batch([ScheduledRow(make_request("a", range(10), [0]), 0, 10)], block_size=8, device=CPU)
