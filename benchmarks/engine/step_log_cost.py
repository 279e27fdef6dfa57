"""What a step log costs: one model serves a workload with a log and without, in turn.

    python -m benchmarks.engine.step_log_cost --model DIR --workload FILE.jsonl --step-log FOLDER [--rounds 8]

Whole processes differ by more than a log costs, so both engines share one model in one process, and every round has
both, the one that goes first alternating. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from app.assembly import assemble_recorded
from app.config import StepLogConfig
from app.engine.engine import Engine
from app.errors import CarouselError
from app.versions import commit
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import LoadedEngine, load_engine
from benchmarks.harness.errors import BenchmarkError, refused
from benchmarks.harness.machine import cpu_name
from benchmarks.harness.options import Options, add_run_options, add_settings_option, positive
from benchmarks.harness.progress import tell


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.step_log_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_options(parser)
    add_settings_option(parser)
    parser.add_argument("--step-log", required=True, metavar="FOLDER", help="where the log is written")
    parser.add_argument("--rounds", type=positive, default=8, metavar="N", help="runs with a log, and without (8)")
    given = parser.parse_args(arguments)
    given.repeat = given.rounds
    try:
        print(json.dumps(measure(Options.of(given), folder=given.step_log)), flush=True)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return 0


def measure(options: Options, *, folder: str) -> dict[str, object]:
    """Seconds of every run, and of the medians the ratio."""
    loaded = load_engine(options)
    recording = recording_engine(loaded, folder)
    contenders = {"without": Carousel(loaded.engine), "with": Carousel(recording)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.serve(loaded.workload.warm_up())
    for number in range(options.repeat):
        for name in sorted(contenders, reverse=number % 2 == 0):
            contenders[name].forget()
            seconds[name].append(round(contenders[name].serve(loaded.workload).seconds, 4))
        tell(f"round {number + 1} of {options.repeat}: { ({name: each[-1] for name, each in seconds.items()}) }")
    writer_s = writer_cpu_s()
    recording.close()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [with_log / without for with_log, without in zip(seconds["with"], seconds["without"], strict=True)]
    return {
        "seconds": seconds,
        "median_s": medians,
        "ratio_of_medians": round(medians["with"] / medians["without"], 4),
        "median_of_ratios": round(statistics.median(ratios), 4),
        "writer_cpu_share": round(writer_s / sum(seconds["with"]), 6),
        "model": options.model,
        "workload": options.workload,
        "settings": loaded.setup.settings,
        "cpu": cpu_name(),
        "commit": commit(),
    }


def writer_cpu_s() -> float:
    """What the logs' threads have computed so far."""
    writers = [thread.ident for thread in threading.enumerate() if thread.name == "step log"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in writers if ident is not None)


def recording_engine(loaded: LoadedEngine, folder: str) -> Engine:
    """The same model and settings behind another engine, which keeps a log."""
    config = loaded.config.model_copy(update={"step_log": StepLogConfig(path=folder)})
    engine = loaded.engine
    return assemble_recorded(config, num_blocks=engine.stats().num_blocks, runner=engine.runner, facts=engine.facts)


if __name__ == "__main__":
    sys.exit(main())
