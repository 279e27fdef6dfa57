"""Compare a benchmark's figures between this checkout and another checkout of the same project.

    git worktree add ../base COMMIT
    python -m benchmarks.paired --base ../base --rounds 5 -- engine.throughput --model DIR --workload FILE.jsonl
    python -m benchmarks.paired --base ../base --base-module throughput -- engine.throughput --model DIR ...

Runs `python -m benchmarks.MODULE ARGUMENTS` in both checkouts in turn, one process each, and reverses the order in
every second round. For each number of their JSON, prints the two medians and the ratio of this checkout to the base
(median over the rounds, lowest and highest value). The last line of stdout is one JSON object. Relative paths in
ARGUMENTS count from the root of each checkout.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.figures import cell, table
from benchmarks.harness.machine import PROJECT
from benchmarks.harness.turns import last_object, median_of_ratios, numbers_of, run_module, turns

HERE, BASE = "here", "base"


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds in both checkouts. Raises BenchmarkError if a run of either checkout fails."""
    trees = {HERE: PROJECT, BASE: Path(given.base).resolve()}
    modules = {HERE: given.module, BASE: given.base_module or given.module}
    if not (trees[BASE] / "benchmarks").is_dir():
        raise BenchmarkError(f"--base {given.base}: there is no checkout of this project (it has no folder benchmarks)")
    found: dict[str, list[dict[str, Any]]] = {HERE: [], BASE: []}
    for number, name in turns((HERE, BASE), rounds=given.rounds):
        tell(f"== round {number} of {given.rounds}: {name}")
        stdout = run_module(f"benchmarks.{modules[name]}", given.arguments, tree=trees[name])
        found[name].append(last_object(stdout))
    compared = comparison(found[HERE], found[BASE], given.figures)
    print(in_words(compared))
    return {
        "figures": compared,
        "commits": {name: rounds[-1].get("commit") for name, rounds in found.items()},
    }


def comparison(
    here: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], pattern: str = ""
) -> dict[str, dict[str, Any]]:
    """Return both medians and the median, lowest and highest ratio of each figure that all runs have, by its name."""
    ours, theirs = [list(map(numbers_of, rounds)) for rounds in (here, base)]
    compared = {}
    for name in ours[0]:
        if re.search(pattern, name) is None or not all(name in figures for figures in (*ours, *theirs)):
            continue
        values, others = [figures[name] for figures in ours], [figures[name] for figures in theirs]
        ratios = [value / other for value, other in zip(values, others, strict=True) if other]
        compared[name] = {
            HERE: statistics.median(values),
            BASE: statistics.median(others),
            "ratio": median_of_ratios(values, others),
            "ratios": [round(ratio, 4) for ratio in (min(ratios), max(ratios))] if ratios else [],
        }
    return compared


def in_words(compared: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, f"{one[HERE]:,.6g}", f"{one[BASE]:,.6g}", cell(one["ratio"], "{:.3f}"),
         " – ".join(f"{ratio:.3f}" for ratio in one["ratios"])]
        for name, one in compared.items()
    ]  # fmt: skip
    return table(["figure", HERE, BASE, "ratio", "from – to"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("paired", __doc__)
    parser.add_argument("--base", required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--base-module", metavar="MODULE", help="the benchmark's name in --base, if it differs")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--figures", default="", metavar="REGEX", help="only figures with names that match")
    parser.add_argument("module", metavar="MODULE", help="for example engine.throughput")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the benchmark")
    return parser


if __name__ == "__main__":
    sys.exit(main())
