"""Lines of the reliability table that were measured in pieces, put together.

    python -m benchmarks.chaos R1 --runs 13 --seed 1 --json one.jsonl
    python -m benchmarks.chaos R1 --runs 13 --seed 2 --json two.jsonl
    python -m benchmarks.chaos.summing one.jsonl two.jsonl

Lines with the same row and fault become one: counts are added, and percentiles are those of all samples together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.verdict import SAMPLES, spread, without_samples
from benchmarks.harness.command import BenchmarkError, command_parser, refused

_SAME = ("row", "fault", "cpu", "num_cores", "commit")

Line = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("chaos.summing", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="as `--json` of benchmarks.chaos wrote it")
    files = parser.parse_args(arguments).files
    try:
        for line in summed([line for path in files for line in _lines(path)]):
            print(json.dumps(without_samples(line)))
    except BenchmarkError as error:
        return refused(error)
    return 0


def summed(lines: Sequence[Line]) -> list[Line]:
    """One line for each row and fault, in the order of their first.

    Raises:
        BenchmarkError: they are of different commits or machines, or a figure is of a kind that cannot be added.
    """
    together: dict[tuple[str, str], Line] = {}
    for line in lines:
        known = together.setdefault((line["row"], line["fault"]), {"pieces": 0})
        for name in _SAME:
            if known.get(name, line[name]) != line[name]:
                raise BenchmarkError(
                    f"{line['row']}: {name} is {known[name]!r} in one line and {line[name]!r} in another"
                )
        known |= {name: line[name] for name in _SAME} | _added(known, _additive(line))
        known["pieces"] += 1
    return [line | _percentiles(line) for line in together.values()]


def _additive(line: Line) -> Line:
    derived = _percentiles(line).keys() | set(_SAME) | {"seed"}
    return {name: value for name, value in line.items() if name not in derived}


def _percentiles(line: Line) -> Line:
    found: Line = {}
    for name, samples in line.items():
        if name.endswith(SAMPLES):
            found |= spread(name.removesuffix(SAMPLES), samples, 2)
    return {name: value for name, value in found.items() if not name.endswith(SAMPLES)}


def _added(known: Mapping[str, Any], more: Mapping[str, Any]) -> Line:
    return dict(known) | {name: _sum(name, known[name], value) if name in known else value
                          for name, value in more.items()}  # fmt: skip


def _sum(name: str, first: Any, second: Any) -> Any:
    if isinstance(first, dict):
        return _added(first, second)
    if isinstance(first, int) and isinstance(second, int):
        return first + second
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    raise BenchmarkError(f"{name} cannot be added up: it is {first!r} in one line and {second!r} in another")


def _lines(path: Path) -> list[Line]:
    try:
        return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
