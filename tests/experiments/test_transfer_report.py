"""The arithmetic of the transfer benchmark, and its table."""

import pytest

from experiments.markdown_table import markdown_table
from experiments.transfer_report import Figures, Report, figures_of


def test_speed_is_of_the_median_round_and_a_ratio_of_the_median_of_ratios():
    seconds = {"ours": [2.0, 4.0, 40.0], "theirs": [1.0, 4.0, 10.0]}
    ours, theirs = figures_of(seconds, "ours", num_bytes=8_000_000_000, num_messages=1_000_000)
    assert ours == Figures("ours", 2.0, pytest.approx(4.0), 1.0)
    assert (theirs.gigabytes_per_second, theirs.microseconds_per_message) == (2.0, pytest.approx(4.0))
    assert theirs.ours == 0.5, "of 0.5, 1 and 0.25"


def test_a_round_that_one_side_missed_is_an_error():
    with pytest.raises(ValueError, match=r"zip\(\)"):
        figures_of({"ours": [1.0, 1.0], "theirs": [1.0]}, "ours", num_bytes=1, num_messages=1)


def test_the_table_is_aligned_markdown():
    report = Report(16, 2, 5, 6144, 3, (Figures("kvsplice", 0.1234, 99.6, 1.0), Figures("a long name", 1.0, 5.0, 0.05)))
    assert "5 of their layers and K and V of 6,144 bytes" in report.title()
    assert report.table() == (
        "| side        | GB/s | us / message | kvsplice / side |\n"
        "| ----------- | ---: | -----------: | --------------: |\n"
        "| kvsplice    | 0.12 |          100 |            1.00 |\n"
        "| a long name | 1.00 |            5 |            0.05 |\n"
    )


def test_a_row_of_another_length_is_our_own_bug():
    with pytest.raises(AssertionError):
        markdown_table(("a", "b"), [("1",)])
