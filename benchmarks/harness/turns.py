"""Alternates measurements (A B, B A, A B), so that slow changes of the machine affect all measurements equally."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.machine import PROJECT, environment


def turns(names: Sequence[str], *, rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each round has each name once, and even rounds reverse the order. Rounds count from 1."""
    for number in range(1, rounds + 1):
        for name in names if number % 2 else reversed(names):
            yield number, name


def median_of_ratios(values: Sequence[float], base: Sequence[float]) -> float | None:
    """Return the median over all rounds of value divided by base; None if no round has a base other than 0."""
    ratios = [value / other for value, other in zip(values, base, strict=False) if other]
    return round(statistics.median(ratios), 4) if ratios else None


def last_object(stdout: str) -> dict[str, Any]:
    """Return the JSON object in the last line of a benchmark's output. Raises BenchmarkError if there is none."""
    lines = stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise BenchmarkError("its last line of output is not a JSON object")
    return found


def run_module(module: str, arguments: Sequence[str], *, tree: Path = PROJECT) -> str:
    """Run `python -m MODULE` in a checkout and return the stdout. The stderr passes through.

    Raises:
        BenchmarkError: the module ended with an error status.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=tree, env=environment(tree))
    if done.returncode != 0:
        raise BenchmarkError(f"{module} in {tree} ended with status {done.returncode}")
    return done.stdout


def numbers_of(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a JSON object by dotted path, without lists, booleans and the object `options`."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping) and name != "options":
            found |= numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found
