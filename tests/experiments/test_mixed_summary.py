"""What is made of the records of streams, on records of the test's own making."""

import pytest

from experiments.mixed_summary import Ends, PhaseRecords, summarise_idle, summarise_long, summarise_streams
from experiments.mixed_tables import MixedResult, failure_lines, long_table, stream_table
from experiments.stream_record import Outcome, StreamRecord


def finished(sent_at, *chunks, tokens=None, prompt=64, late_by=0.0) -> StreamRecord:
    tokens = len(chunks) if tokens is None else tokens
    return StreamRecord(sent_at, chunks[-1], Outcome.FINISHED, chunks, prompt, tokens, late_by)


def phase(*streams, start=0.0, stop=10.0) -> PhaseRecords:
    return PhaseRecords(start, stop, streams, (), (0.001, 0.002))


def test_n_chunks_have_a_ttft_and_n_minus_one_gaps():
    record = finished(1.0, 1.5, 1.6, 1.8)
    assert record.ttft == 0.5
    assert [length for _, length in record.gaps(0, 10)] == pytest.approx([0.1, 0.2])
    assert record.first_gap(0, 10) == pytest.approx(0.1)
    assert record.tokens_per_chunk == 1.0


def test_a_stream_without_content_has_no_figures():
    record = StreamRecord(1.0, 4.0, Outcome.CUT)
    assert (record.ttft, record.gaps(0, 10), record.first_gap(0, 10), record.tokens_per_chunk) == (None, [], None, None)
    assert record.open_gap == 3.0


def test_only_what_ends_in_the_window_counts():
    record = finished(0.0, 1.0, 2.0, 3.0, 4.0)
    assert [when for when, _ in record.gaps(2.5, 3.5)] == [3.0]
    assert record.first_gap(2.5, 3.5) is None
    summary = summarise_streams(phase(record, finished(2.6, 2.8, 3.6), start=2.5, stop=3.5))
    assert summary.itl.count == 1
    assert summary.ttft.count == 1, "the first stream was sent before the window"
    assert summary.tokens_per_second == pytest.approx(2.0), "chunks at 3.0 and 2.8"


def test_tokens_a_second_count_all_tokens_of_a_chunk():
    summary = summarise_streams(phase(finished(0.0, 1.0, 2.0, tokens=6), finished(0.0, 1.0, 2.0)))
    assert (summary.tokens_per_chunk, summary.max_tokens_per_chunk) == (2.0, 3.0)
    assert summary.tokens_per_second == pytest.approx(4 * 2.0 / 10)


def test_streams_that_are_cut_count_with_what_they_showed():
    stalled = StreamRecord(9.0, 10.0, Outcome.CUT)
    running = StreamRecord(8.0, 10.0, Outcome.CUT, (8.5, 9.5), prompt_tokens=None)
    summary = summarise_streams(phase(stalled, running))
    assert summary.ends == Ends(0, 2, 0, ())
    assert summary.longest_open_gap_ms == 1000.0
    assert summary.ttft.max_ms == 1000.0, "it has waited so long, at least"
    assert summary.itl.p50_ms == 1000.0


def test_failures_are_counted_apart_and_named():
    failed = [StreamRecord(1.0, 1.1, Outcome.FAILED, failure="HTTP 503") for _ in range(2)]
    summary = summarise_streams(phase(*failed, finished(1.0, 1.5, 1.6)))
    assert summary.ends == Ends(1, 0, 2, ("HTTP 503 (2 times)",))
    assert summary.ttft.count == 1


def test_long_prompts_say_how_late_they_were_sent():
    records = [finished(6.1, 7.1, late_by=0.1, prompt=1500), finished(12.0, 14.0, prompt=1499)]
    summary = summarise_long(records, 0.0, 20.0, wanted_per_second=0.2)
    assert summary.ttft.p50_ms == pytest.approx(1500.0)
    assert summary.late.max_ms == pytest.approx(100.0)
    assert summary.prompt_tokens == (1499, 1500)
    assert (summary.sent_per_second, summary.wanted_per_second) == (0.1, 0.2)


def test_prompts_on_the_idle_system_go_out_in_turns():
    summary = summarise_idle([finished(0.0, 1.0), finished(50.0, 51.0), finished(90.0, 93.0)])
    assert summary.ttft.max_ms == 3000.0
    assert summary.sent_per_second == pytest.approx(3 / 5)


def test_the_tables_show_both_sides_and_their_ratio():
    alone = summarise_streams(phase(finished(0.0, 1.0, 1.1, 1.2)))
    mixed = summarise_streams(phase(finished(0.0, 1.0, 1.2, 1.4)))
    idle = summarise_long([finished(0.0, 1.0, prompt=1500)], 0.0, 2.0)
    failed = StreamRecord(1.0, 1.1, Outcome.FAILED, failure="HTTP 503")
    loaded = summarise_long([finished(0.0, 1.5, prompt=1500), finished(0.0, 1.5, prompt=1502), failed], 0.0, 2.0, 2.0)
    result = MixedResult(alone, mixed, idle, loaded)
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:5]] for cells in split(stream_table(result))}
    assert rows["ITL p50 ms"] == ["100.0", "200.0", "2.00"]
    assert rows["tokens a second"] == ["0.3", "0.3", "1.00"]
    assert rows["over the window"][0] == "too few tokens to tell"
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:5]] for cells in split(long_table(result))}
    assert rows["TTFT p50 ms"] == ["1000.0", "1500.0", "1.50"]
    assert rows["prompt tokens"][:2] == ["1500", "1500 to 1502"]
    assert rows["prompts sent a second / wanted"][:2] == ["0.500 / one by one", "1.500 / 2.000"]
    assert rows["finished / cut / failed"][:2] == ["1 / 0 / 0", "2 / 0 / 1"]
    assert failure_lines(result) == ["FAILED: HTTP 503 (1 times)"]


def split(table: str) -> list[list[str]]:
    return [line.split("|") for line in table.splitlines()]
