"""A benchmark's JSON line, kept in a file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.errors import BenchmarkError


def write_json(path: str, line: str) -> None:
    """Write it and end the line. Raises BenchmarkError when it cannot be written."""
    try:
        Path(path).write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"--json {path} cannot be written: {error}") from error
