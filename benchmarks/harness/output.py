"""A benchmark's figures as one line of JSON, printed and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import BenchmarkError, refused

Figures = Mapping[str, Any]


def report(measure: Callable[[], Figures], path: str | None, *, is_bad: Callable[[Figures], bool] | None = None) -> int:
    """Measure, print the figures and keep them at a path if there is one; the exit status of the program.

    `is_bad`: whether these figures are a failure of what was measured, and the status 1.
    """
    try:
        figures = measure()
        line = json.dumps(figures)
        print(line, flush=True)  # before the file: one that cannot be written must not cost the run
        if path is not None:
            write_json(path, line)
    except BenchmarkError as error:
        return refused(error)
    return int(is_bad is not None and is_bad(figures))


def write_json(path: str, line: str) -> None:
    """Write it and end the line. Raises BenchmarkError when it cannot be written."""
    try:
        Path(path).write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"--json {path} cannot be written: {error}") from error
