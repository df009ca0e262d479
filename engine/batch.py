"""One step's work as tensors: a ragged batch that mixes prompt chunks and single-token rows.

Rows of one token come first, so that decode and prefill attention each get one contiguous run of queries:

    tokens      | d0 | d1 | d2 |  p0 p0 p0 p0  |  p1 p1 p1  |
                |<-- decode -->|<-------- prefill --------->|
                0         num_decode                    num_tokens

A row of no tokens draws one more next token from the logits of the row before it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from engine.block_pool import blocks_for
from engine.request import ScheduledRow
from kernels.face import RaggedRows

_TABLE_DTYPE: Final = torch.int32
"""What a C int, array's "i", is on every machine that torch runs on."""


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, of which S want a next token. Row indices count in the order given to `build_batch`."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, place of each token in its request
    slot_mapping: torch.Tensor  # [T] int64, where each token's K and V go in the pool
    decode: RaggedRows | None  # rows of one token, None if there are none
    prefill: RaggedRows | None  # rows of several tokens
    sample_tokens: torch.Tensor  # [S] int64, the tokens whose logits give a next token
    sample_rows: tuple[int, ...]  # [S] rows that they belong to, ascending
    all_sample: bool  # every token gives one next one, so that `sample_tokens` names them all in order
    score_tokens: torch.Tensor | None = None  # [P] int64, the prompt tokens whose logits are asked for, row by row

    @property
    def num_decode(self) -> int:
        return 0 if self.decode is None else self.decode.num_queries


def build_batch(rows: Sequence[ScheduledRow], block_size: int, device: torch.device) -> Batch:
    """Lays out `rows` for a forward over a pool with blocks of `block_size` tokens; the requests are only read."""
    for row in rows:
        _check_row(row, block_size)
    decode = [row for row in rows if row.count == 1]
    prefill = [row for row in rows if row.count > 1]
    ordered = [*decode, *prefill]
    last_token = _last_tokens(rows)
    sample_rows = tuple(index for index, row in enumerate(rows) if row.samples)
    sample_tokens = [last_token[index] for index in sample_rows]
    scored = [last - row.stop + 1 + place for last, row in zip(last_token, rows, strict=True) for place in row.scored]
    return Batch(
        token_ids=_to_device(
            torch.tensor([token for row in ordered for token in row.request.token_slice(row.start, row.stop)]), device
        ),
        positions=_to_device(
            _joined(_positions(decode), [torch.arange(row.start, row.stop) for row in prefill]), device
        ),
        slot_mapping=_to_device(
            _joined(
                _slots(decode, block_size),
                [slots_of(row.request.block_ids, row.start, row.stop, block_size) for row in prefill],
            ),
            device,
        ),
        decode=_ragged_rows(decode, block_size, device) if decode else None,
        prefill=_ragged_rows(prefill, block_size, device) if prefill else None,
        sample_tokens=_to_device(torch.tensor(sample_tokens, dtype=torch.int64), device),
        sample_rows=sample_rows,
        all_sample=sample_tokens == list(range(sum(row.count for row in rows))),
        score_tokens=_to_device(torch.tensor(scored, dtype=torch.int64), device) if scored else None,
    )


def slots_of(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> torch.Tensor:
    """Slots of a request's tokens [start, stop), [stop - start] int64 on the CPU. `block_ids`: all of its blocks."""
    first = start // block_size
    blocks = torch.tensor(block_ids[first : blocks_for(stop, block_size)], dtype=torch.int64)
    positions = torch.arange(start, stop)
    return blocks[positions // block_size - first] * block_size + positions % block_size


def _positions(rows: Sequence[ScheduledRow]) -> torch.Tensor:
    """Of rows of one token each, [len(rows)] int64."""
    return torch.tensor([row.start for row in rows], dtype=torch.int64)


def _slots(rows: Sequence[ScheduledRow], block_size: int) -> torch.Tensor:
    """`slots_of` rows of one token each: a tensor a row would cost more than the model's smallest kernels."""
    slots = [row.request.block_ids[row.start // block_size] * block_size + row.start % block_size for row in rows]
    return torch.tensor(slots, dtype=torch.int64)


def _joined(first: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([first, *others]) if others else first


def _check_row(row: ScheduledRow, block_size: int) -> None:
    request = row.request
    if row.count == 0:
        assert row.samples, f"request {request.key}: a row of nothing for nothing"
        return
    assert 0 <= row.start < row.stop <= request.num_tokens, (request.key, row.start, row.stop, request.num_tokens)
    room = len(request.block_ids) * block_size
    assert row.stop <= room, f"request {request.key}: tokens up to {row.stop}, blocks for {room}"


def _last_tokens(rows: Sequence[ScheduledRow]) -> list[int]:
    """For each row, where its last token stands in the batch."""
    next_decode, next_prefill = 0, sum(1 for row in rows if row.count == 1)
    last: list[int] = []
    for row in rows:
        if row.count == 0:
            last.append(last[-1])
        elif row.count == 1:
            last.append(next_decode)
            next_decode += 1
        else:
            next_prefill += row.count
            last.append(next_prefill - 1)
    return last


def _ragged_rows(rows: Sequence[ScheduledRow], block_size: int, device: torch.device) -> RaggedRows:
    query_lens = tuple(row.count for row in rows)
    context_lens = tuple(row.stop for row in rows)
    query_start = [0, *accumulate(query_lens)]
    return RaggedRows(
        query_start=_to_device(torch.tensor(query_start, dtype=torch.int32), device),
        context_lens=_to_device(torch.tensor(context_lens, dtype=torch.int32), device),
        block_tables=_to_device(_block_tables(rows, block_size), device),
        host_query_lens=query_lens,
        host_context_lens=context_lens,
    )


def _block_tables(rows: Sequence[ScheduledRow], block_size: int) -> torch.Tensor:
    """[R, most blocks of a row] int32 on the CPU; only the blocks that hold the row's context are filled in."""
    lengths = [blocks_for(row.stop, block_size) for row in rows]
    width = max(lengths)
    # One array for all rows: a tensor a row would cost as much as a kernel.
    tables = array("i", bytes(len(rows) * width * _TABLE_DTYPE.itemsize))
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tables[index * width : index * width + length] = array("i", row.request.block_ids[:length])
    return torch.frombuffer(tables, dtype=_TABLE_DTYPE).view(len(rows), width)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Queues the copy without waiting: pinned memory lets it overlap with what the device is doing."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
