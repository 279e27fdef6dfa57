"""What log-probabilities cost: one engine serves a workload whose requests all ask for them, and none does, in turn.

    python -m benchmarks.engine.logprobs_cost --model DIR --workload FILE.jsonl [--top 5] [--rounds 8] [--set ...]

Every round has both, the one that goes first alternating, and the same tokens. With `--prompts` those of the prompts
are asked for too. CPU time is told as well: with `--threads 1` it is what a run costs on a machine that others use too.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from app.errors import CarouselError
from app.versions import commit
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import load_engine
from benchmarks.harness.errors import BenchmarkError, refused
from benchmarks.harness.machine import cpu_name
from benchmarks.harness.options import Options, add_run_options, add_settings_option, positive
from benchmarks.harness.progress import tell
from benchmarks.harness.workload import TimedRequest, Workload


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.logprobs_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_options(parser)
    add_settings_option(parser)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="likeliest tokens with each (5)")
    parser.add_argument("--prompts", action="store_true", help="of the prompts too, which reads no prefix cache")
    parser.add_argument("--rounds", type=positive, default=8, metavar="N", help="runs with and without (8)")
    given = parser.parse_args(arguments)
    given.repeat = given.rounds
    try:
        print(json.dumps(measure(Options.of(given), num_top=given.top, prompts=given.prompts)), flush=True)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return 0


def measure(options: Options, *, num_top: int, prompts: bool) -> dict[str, object]:
    """Seconds of every run, and of the medians the ratio."""
    loaded = load_engine(options)
    asking = asking_workload(loaded.workload, num_top=num_top, prompts=prompts)
    workloads = {"without": loaded.workload, "with": asking}
    contender = Carousel(loaded.engine)
    for workload in workloads.values():
        contender.serve(workload.warm_up())
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    cpu_s: dict[str, list[float]] = {name: [] for name in workloads}
    for number in range(options.repeat):
        for name in sorted(workloads, reverse=number % 2 == 0):
            contender.forget()
            began_s = time.process_time()
            seconds[name].append(round(contender.serve(workloads[name]).seconds, 4))
            cpu_s[name].append(round(time.process_time() - began_s, 4))
        tell(f"round {number + 1} of {options.repeat}: { ({name: each[-1] for name, each in seconds.items()}) }")
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "median_of_ratios": median_of_ratios(seconds),
        "median_of_cpu_ratios": median_of_ratios(cpu_s),
        "top": num_top,
        "prompts": prompts,
        "model": options.model,
        "workload": options.workload,
        "settings": loaded.setup.settings,
        "cpu": cpu_name(),
        "commit": commit(),
    }


def median_of_ratios(seconds: dict[str, list[float]]) -> float:
    """Of the rounds, how much longer those took who asked."""
    ratios = [asked / without for asked, without in zip(seconds["with"], seconds["without"], strict=True)]
    return round(statistics.median(ratios), 4)


def asking_workload(workload: Workload, *, num_top: int, prompts: bool) -> Workload:
    """The same requests, each of which asks."""

    def asking(timed: TimedRequest) -> TimedRequest:
        sampling = replace(timed.request.sampling, logprobs=num_top, prompt_logprobs=num_top if prompts else None)
        return replace(timed, request=replace(timed.request, sampling=sampling))

    return replace(workload, requests=tuple(map(asking, workload.requests)))


if __name__ == "__main__":
    sys.exit(main())
