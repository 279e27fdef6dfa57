"""Tables in the pages of the documentation that are written from code."""

from __future__ import annotations

from pathlib import Path

_END = "<!-- The end of the table. -->"


def with_table(page: Path, table: str, *, command: str, source: str) -> str:
    """Return the text of a page with this table between the two marks of the page.

    command: the module that writes the table. source: the file to change instead of the table.
    """
    begin = f"<!-- Written by `python -m {command}`. Change {source}, not this table. -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    assert found, f"{page} has no line {begin}"
    _, _, after = rest.partition(_END)
    return f"{before}{begin}\n\n{table}\n\n{_END}{after}"
