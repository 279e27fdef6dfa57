"""How fast the engine serves a workload: `python -m benchmarks.engine.throughput --model DIR --workload FILE.jsonl`.

Progress goes to stderr; the last line of stdout is one JSON object. Requests come at their `arrival_s`, or all at once;
the prefix cache is emptied between repeats. The figures of the workloads after `--also` stand under `also`, by the
names of their files without the suffix.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import load_engine
from benchmarks.engine.run import figures_of_others, measured_runs, summed_up, warmed_up, write_outputs
from benchmarks.harness.command import command_parser, run_command
from benchmarks.harness.figures import rounded
from benchmarks.harness.machine import seconds_since_start
from benchmarks.harness.options import add_run_options
from benchmarks.harness.settings import parse_assignments


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.throughput", __doc__)
    add_run_options(parser, repeat=3, outputs=True, settings=True, also=True)
    return run_command(parser, measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, repeat, sum up."""
    loaded = load_engine(given, parse_assignments(given.set))
    contender, age_s = Carousel(loaded.engine), seconds_since_start()
    first_token_s = warmed_up(contender, loaded.workload)
    runs = measured_runs(contender, loaded.workload, repeat=given.repeat)
    if given.outputs is not None:
        write_outputs(given.outputs, loaded.workload, runs[-1])
    start_to_first_token_s = None if age_s is None else age_s + first_token_s
    figures = summed_up(loaded.setup, loaded.workload, runs, start_to_first_token_s=start_to_first_token_s)
    return figures | {
        "start_to_ready_s": rounded(age_s, 3),
        "also": figures_of_others(contender, loaded.setup, loaded.also, repeat=given.repeat),
    }


if __name__ == "__main__":
    sys.exit(main())
