"""What is made of streams that were alone, on records of the test's own making, and a run from end to end."""

import json

import pytest

from experiments import handoff
from experiments.handoff_summary import (
    EXPOSED_METRIC,
    Handoff,
    HandoffResult,
    HistogramTotal,
    handoff_of,
    handoff_table,
    histogram_total,
    summarise,
    verdict_lines,
)
from experiments.stream_record import Outcome, StreamRecord
from tests.experiments.fake_server import FakeServer

METRICS = f"""# HELP {EXPOSED_METRIC} All KV computed to decode's word that it has everything.
# TYPE {EXPOSED_METRIC} histogram
{EXPOSED_METRIC}_bucket{{le="0.1"}} 3.0
{EXPOSED_METRIC}_bucket{{le="+Inf"}} 4.0
{EXPOSED_METRIC}_count 4.0
{EXPOSED_METRIC}_sum 0.5
{EXPOSED_METRIC}_summary 99.0
"""


def finished(*chunks, sent_at=1.0) -> StreamRecord:
    return StreamRecord(sent_at, chunks[-1], Outcome.FINISHED, chunks, 1500, len(chunks))


def test_the_first_gap_is_kept_out_of_the_itl():
    each = handoff_of(finished(3.0, 3.06, 3.08, 3.12, 3.16))
    assert (each.ttft, each.gap, each.second_token) == pytest.approx((2.0, 0.06, 2.06))
    assert each.itl == pytest.approx(0.04)
    assert each.gap_ratio == pytest.approx(1.5)


@pytest.mark.parametrize(
    "record",
    [
        finished(2.0, 2.1),
        finished(2.0, 2.1, 2.1),
        StreamRecord(1.0, 3.0, Outcome.CUT, (2.0, 2.1, 2.2, 2.3)),
        StreamRecord(1.0, 3.0, Outcome.FAILED, (2.0, 2.1, 2.2, 2.3), failure="HTTP 503"),
        StreamRecord(1.0, 3.0, Outcome.FINISHED),
    ],
    ids=["no ITL", "all but the first at once", "cut", "failed", "no chunk"],
)
def test_a_stream_that_says_nothing_of_the_handoff_does_not_count(record):
    result = summarise([record, finished(3.0, 3.06, 3.1)], None, None)
    assert len(result.handoffs) == 1
    assert len(result.failures) == 1
    assert verdict_lines(result)[-1] == f"FAILED: {result.failures[0]}"


def test_sum_and_count_of_a_histogram_are_read_and_nothing_alike():
    assert histogram_total(METRICS, EXPOSED_METRIC) == HistogramTotal(0.5, 4.0)
    assert histogram_total(METRICS.replace("exposed", "other"), EXPOSED_METRIC) is None


def test_a_histogram_with_labels_is_added_up():
    text = 'h_sum{worker="a b"} 1.5\nh_sum{worker="c"} 2\nh_count{worker="a b"} 3\nh_count{worker="c"} 1\n'
    assert histogram_total(text, "h") == HistogramTotal(3.5, 4.0)


def test_only_what_was_exposed_during_the_run_counts():
    streams = [finished(2.9, 3.0, 3.1, 3.2)] * 2  # 2 s to the second token
    result = summarise(streams, HistogramTotal(10.0, 7.0), HistogramTotal(10.4, 9.0))
    assert result.exposed.mean == pytest.approx(0.2)
    assert result.exposed_share == pytest.approx(0.1)
    assert "mean 200.0 ms of 2 hand-overs" in verdict_lines(result)[1]
    assert verdict_lines(result)[1].endswith("10.0%, demanded at most 5.0%: NOT MET")


def test_without_the_metric_or_a_handover_it_is_said_to_be_unknown():
    streams = [finished(2.9, 3.0, 3.1, 3.2)]
    for after in (None, HistogramTotal(10.0, 7.0)):
        result = summarise(streams, HistogramTotal(10.0, 7.0), after)
        assert result.exposed_share is None
        assert "unknown" in verdict_lines(result)[1]


@pytest.mark.parametrize(("gap", "verdict"), [(0.03, ": met"), (0.031, "NOT MET")])
def test_the_median_stream_decides_about_the_gap(gap, verdict):
    handoffs = (Handoff(1.0, 9.0, 0.02), Handoff(1.0, gap, 0.02), Handoff(1.0, 0.0, 0.02))
    assert verdict_lines(HandoffResult(handoffs, None, ()))[0].endswith(verdict)


def test_the_table_has_median_and_p90():
    table = handoff_table(HandoffResult(tuple(Handoff(n / 10, 0.02, 0.02) for n in range(11)), None, ()))
    assert "| TTFT ms                   |  500.0 | 900.0 |" in table
    assert "| time to second token ms   |  520.0 | 920.0 |" in table
    assert "| gap / ITL                 |   1.00 |  1.00 |" in table


def test_a_whole_run_sends_fresh_prompts_one_after_another(tmp_path, capsys):
    before, after = (
        f"{EXPOSED_METRIC}_sum {seconds}\n{EXPOSED_METRIC}_count {count}\n" for seconds, count in ((5, 2), (8, 5))
    )
    server, file = FakeServer(gap=0.01, metrics=(before, after)), tmp_path / "out.json"
    with server.running() as url:
        arguments = ["--url", url, "--requests", "3", "--prompt-tokens", "7", "--output", "5", "--json", str(file)]
        assert handoff.main(arguments) == 0
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 3 + handoff.WARM_UP_REQUESTS
    assert {len(prompt) for prompt in prompts} == {7}
    out = capsys.readouterr().out
    assert "3 fresh prompts of 7 tokens, 5 out" in out
    assert "mean 1000.0 ms of 3 hand-overs" in out
    assert all(each["ttft"] >= 0.01 for each in json.loads(file.read_text())["handoffs"])


def test_a_server_that_fails_or_is_not_there_is_reported(capsys):
    with FakeServer(error_after=2).running() as url:
        assert handoff.main(["--url", url, "--requests", "2", "--output", "5"]) == 1
    assert capsys.readouterr().out.count("FAILED: ") == 2
    assert handoff.main(["--url", url]) == 1
    assert "cannot be measured" in capsys.readouterr().err
