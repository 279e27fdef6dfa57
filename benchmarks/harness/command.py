"""The command line of a benchmark: options, progress on stderr, figures as one line of JSON on stdout, errors."""

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
    """A mistake in a workload, an option or a setting, or a failed part of a benchmark. The message is one sentence."""


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m benchmarks.NAME`; `description` is the docstring of the module."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def numbers_above_zero(option: str, text: str) -> list[float]:
    """Parse a list such as `0.5,0.8,1`. Raises BenchmarkError if the text is not a list of positive numbers."""
    try:
        return [above_zero(part) for part in text.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise BenchmarkError(f"{option} {text}: write numbers above 0, for example 0.5,0.8,1,2") from error


def tell(text: str) -> None:
    """Print progress or a note to stderr, because stdout is for figures."""
    print(text, file=sys.stderr, flush=True)


def where() -> dict[str, Any]:
    """Return the machine, the commit and the versions that a figure was measured with."""
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
    """Measure; print the figures, the options and the machine as one JSON object. Return the program's exit status.

    With `--json`, a file gets the object as well. `is_bad`: whether the figures show a failure of the measured system
    (status 1). A mistake prints one line to stderr (status 2).
    """
    parser.add_argument("--json", metavar="FILE", help="also write the JSON object to this file")
    given = parser.parse_args(arguments)
    options = {name: value for name, value in vars(given).items() if name != "json" and not callable(value)}
    try:
        figures = measure(given)
        line = json.dumps({**figures, "options": options, **where()})
        print(line, flush=True)  # print first: an unwritable file must not lose the figures
        if given.json is not None:
            write_json(given.json, line)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return int(is_bad is not None and is_bad(figures))


def ran(command: Sequence[str], *, timeout_s: float | None = None, **options: Any) -> str:
    """Run a program and return its stdout. options: further arguments of `subprocess.run`.

    Raises:
        BenchmarkError: the program cannot start, fails or times out. The message quotes its `ERROR:` lines, or stderr.
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
    """Write a line of JSON to a file. Raises BenchmarkError if the file cannot be written."""
    try:
        Path(path).write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"--json {path} cannot be written: {error}") from error


def refused(error: Exception) -> int:
    """Print a mistake to stderr and return the exit status for mistakes."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the names close to it, or all names if none is close."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(names)}"
