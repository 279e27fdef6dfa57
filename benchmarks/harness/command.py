"""A benchmark as a command: options, progress on stderr, figures as one line of JSON on stdout, errors."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from app.cores import num_cores
from app.errors import CarouselError
from app.versions import commit
from benchmarks.harness import machine
from deployments.cli import above_zero as above_zero
from deployments.cli import positive as positive

Figures = Mapping[str, Any]


class BenchmarkError(Exception):
    """A mistake in a workload, an option or a setting, or a part of a benchmark that failed: one sentence."""


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """For `python -m benchmarks.NAME`; the description is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def numbers_above_zero(option: str, text: str) -> list[float]:
    """Read `0.5,0.8,1`. Raises BenchmarkError when it is no such list."""
    try:
        return [above_zero(part) for part in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise BenchmarkError(f"{option} {text}: write numbers above 0, for example 0.5,0.8,1,2") from error


def tell(text: str) -> None:
    """Progress and notes go to stderr; stdout is for figures."""
    print(text, file=sys.stderr, flush=True)


def where() -> dict[str, Any]:
    """The machine and the code behind a figure."""
    return {
        "cpu": machine.cpu_name(),
        "num_cores": num_cores(),
        "commit": commit(),
        "versions": machine.versions(),
    }


def run_command(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Figures],
    arguments: Sequence[str] | None,
    *,
    is_bad: Callable[[Figures], bool] | None = None,
) -> int:
    """Measure; print the figures, the options and the machine as one JSON object. Returns the program's exit status.

    The object is written to the file of `--json`, too. `is_bad`: whether these figures mean that what was measured has
    failed (status 1). A mistake is one line on stderr (status 2).
    """
    parser.add_argument("--json", metavar="FILE", help="write the JSON object there too")
    given = parser.parse_args(arguments)
    options = {name: value for name, value in vars(given).items() if name != "json" and not callable(value)}
    try:
        figures = measure(given)
        line = json.dumps({**figures, "options": options, **where()})
        print(line, flush=True)  # before the file: one that cannot be written must not cost the run
        if given.json is not None:
            write_json(given.json, line)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return int(is_bad is not None and is_bad(figures))


def ran(command: Sequence[str], *, timeout_s: float | None = None, **options: Any) -> str:
    """What a program prints on stdout. options: more of `subprocess.run`.

    Raises:
        BenchmarkError: it cannot be started, fails or does not end; with what it said, or its errors where it has some.
    """
    shown = f"`{' '.join(command)}`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"{shown} failed: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = " ".join([line for line in lines if line.startswith("ERROR:")] or lines)
        raise BenchmarkError(f"{shown} failed with status {done.returncode}: {said[-2000:]}")
    return str(done.stdout).strip()


def write_json(path: str, line: str) -> None:
    """Write it and end the line. Raises BenchmarkError when it cannot be written."""
    try:
        Path(path).write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"--json {path} cannot be written: {error}") from error


def refused(error: Exception) -> int:
    """Print a mistake on stderr; returns the exit status that stands for it."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the names close to one that does not exist, or all of them where none is close."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(names)}"
