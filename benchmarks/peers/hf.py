"""How fast transformers serves a workload: `python -m benchmarks.peers.hf hf-static-32 --model DIR …`.

Same options and the same JSON as benchmarks.engine.throughput, one line for each peer; what a peer does not report is
null. All peers run in this process, so the peak memory of a later one includes that of the earlier ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from app.errors import CarouselError
from benchmarks.engine.contender import Contender, measured_runs
from benchmarks.engine.engine_setup import resolve_device
from benchmarks.engine.report import Report, Setup, report, write_outputs
from benchmarks.engine.start_time import FirstTokenWatch
from benchmarks.harness.errors import BenchmarkError, refused
from benchmarks.harness.options import Options, add_outputs_option, add_repeat_option, add_run_options
from benchmarks.harness.progress import tell
from benchmarks.harness.workload import read_workload
from benchmarks.peers.hf_continuous import TransformersContinuous
from benchmarks.peers.hf_model import check_greedy, load_hf_model, peer_dtype
from benchmarks.peers.hf_static import StaticBatches

PEERS: dict[str, Callable[[Any], Contender]] = {
    "hf-generate": lambda model: StaticBatches(model, batch_size=1),  # plainly, one request at a time
    "hf-static-8": lambda model: StaticBatches(model, batch_size=8),
    "hf-static-32": lambda model: StaticBatches(model, batch_size=32),
    "hf-continuous": TransformersContinuous,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.hf", description=__doc__)
    parser.add_argument("names", nargs="+", choices=tuple(PEERS), metavar="NAME", help=", ".join(PEERS))
    add_run_options(parser)
    add_repeat_option(parser)
    add_outputs_option(parser)
    given = parser.parse_args(arguments)
    try:
        options = Options.of(given)
        if options.outputs is not None and len(given.names) > 1:
            raise BenchmarkError("--outputs is for one peer at a time")
        for name in given.names:
            print(measure(name, options).to_json(), flush=True)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return 0


def measure(name: str, options: Options) -> Report:
    """Load, warm up, repeat, sum up."""
    workload = read_workload(options.workload)
    check_greedy(workload)
    tell(f"loading {options.model} for {name}")
    contender = FirstTokenWatch(PEERS[name](load_hf_model(options)))
    runs = measured_runs(contender, workload, repeat=options.repeat)
    if options.outputs is not None:
        write_outputs(options.outputs, workload, runs[-1])
    setup = Setup(
        engine=name,
        model=options.model,
        workload=options.workload,
        dtype=peer_dtype(options),
        threads=options.threads,
        device=resolve_device(options.device),
        settings=[],
    )
    return report(setup, workload, runs, start_to_first_token_s=None)


if __name__ == "__main__":
    sys.exit(main())
