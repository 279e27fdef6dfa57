"""Figures: percentiles with numpy's default interpolation, and Markdown tables that are readable in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first column is aligned left, the number columns are aligned right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in (heads, rule, *rows))


def cell(number: float | None, form: str = "") -> str:
    """Return the text of a table cell: a dash for None; by default three decimals below 0.1, and two above."""
    if number is None:
        return "–"
    return (form or ("{:.2f}" if number >= 0.1 else "{:.3f}")).format(number)


Columns = Sequence[tuple[str, str, str]]  # (head, name of the figure, format) of each column


def table_of(columns: Columns, rows: Sequence[Mapping[str, Any]], **names: Sequence[str]) -> str:
    """Return a table with these figures of each row. `names`: the cells of the first columns, by head."""
    cells = [
        [*name, *(cell(row[figure], form) for _, figure, form in columns)]
        for *name, row in zip(*names.values(), rows, strict=True)
    ]
    return table([*names, *(head for head, _, _ in columns)], cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    padded = [first.ljust(widths[0]), *(each.rjust(width) for each, width in zip(others, widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Return the percentile `percent` (0 to 100), interpolated between samples; None if there are no samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles(
    name: str, samples: Sequence[float], percents: Sequence[int] = (50, 95, 99), *, unit: str = "s", digits: int = 6
) -> dict[str, float | None]:
    """Return the percentiles, under the names `NAME_pPERCENT_UNIT`."""
    return {f"{name}_p{percent}_{unit}": rounded(percentile(samples, percent), digits) for percent in percents}


def rounded(number: float | None, digits: int = 6) -> float | None:
    return None if number is None else round(number, digits)
