"""The rows that `make bulk` answers."""

from __future__ import annotations

from pathlib import Path

from scripts.bulk_example import lines


def test_the_bundled_rows_are_those_that_the_script_makes() -> None:
    path = Path(__file__).parents[2] / "deployments" / "bulk" / "example.jsonl"
    assert path.read_text() == lines(), "run `python -m scripts.bulk_example > deployments/bulk/example.jsonl`"
