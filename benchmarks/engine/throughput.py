"""How fast the engine serves a workload: `python -m benchmarks.engine.throughput --model DIR --workload FILE.jsonl`.

Progress goes to stderr; the last line of stdout is one JSON object. Requests come at their `arrival_s`, or all at once;
the prefix cache is emptied between repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.engine.carousel import Carousel
from benchmarks.engine.contender import FirstTokenWatch, measured_runs
from benchmarks.engine.engine_setup import load_engine
from benchmarks.engine.report import Report, summed_up, write_outputs
from benchmarks.harness.command import command_parser, report
from benchmarks.harness.options import (
    Options,
    add_outputs_option,
    add_repeat_option,
    add_run_options,
    add_settings_option,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.throughput", __doc__)
    add_run_options(parser)
    add_repeat_option(parser)
    add_outputs_option(parser)
    add_settings_option(parser)
    given = parser.parse_args(arguments)
    return report(lambda: asdict(measure(Options.of(given))), given)


def measure(options: Options) -> Report:
    """Load, warm up, repeat, sum up."""
    loaded = load_engine(options)
    contender = FirstTokenWatch(Carousel(loaded.engine))
    runs = measured_runs(contender, loaded.workload, repeat=options.repeat)
    if options.outputs is not None:
        write_outputs(options.outputs, loaded.workload, runs[-1])
    return summed_up(loaded.setup, loaded.workload, runs, start_to_first_token_s=contender.start_to_first_token_s)


if __name__ == "__main__":
    sys.exit(main())
