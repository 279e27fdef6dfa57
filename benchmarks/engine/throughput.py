"""Measure how fast the engine serves: `python -m benchmarks.engine.throughput --model DIR --workload FILE.jsonl`.

Progress goes to stderr; the last line of stdout is one JSON object. Requests come at their `arrival_s`, or all at once.
The prefix cache is emptied between repeats. The figures of the workloads after `--also` are listed under `also`, by the
names of their files without the suffix.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import load_engine
from benchmarks.engine.run import measured
from benchmarks.harness.command import command_parser, run_command
from benchmarks.harness.options import add_run_options
from benchmarks.harness.settings import parse_assignments


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.throughput", __doc__)
    add_run_options(parser, repeat=3, outputs=True, settings=True, also=True)
    return run_command(parser, measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Load the engine, then measure all workloads."""
    loaded = load_engine(given, parse_assignments(given.set))
    return measured(
        Carousel(loaded.engine), loaded.setup, loaded.workload, also=loaded.also, repeat=given.repeat,
        outputs=given.outputs,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
