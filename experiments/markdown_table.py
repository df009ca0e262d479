"""A table as it goes into a document under docs/, and as it reads well in a terminal."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others, which are numbers, to the right; columns as wide as their widest cell."""
    assert all(len(row) == len(header) for row in rows), (header, rows)
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "".join(_line(row, widths) for row in (header, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return " | ".join(["| " + first.strip().ljust(widths[0]), *others]) + " |\n"
