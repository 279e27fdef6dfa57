"""A table in Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column stands left, the others, being numbers, right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in (heads, rule, *rows))


def cell(number: float | None, form: str) -> str:
    """A number in its cell; a dash for what is unknown."""
    return "–" if number is None else form.format(number)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    padded = [first.ljust(widths[0]), *(each.rjust(width) for each, width in zip(others, widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"
