"""How fast transformers serves a workload: `python -m benchmarks.peers.hf hf-static-32 --model DIR …`.

Same options and the same JSON as benchmarks.engine.throughput; what a peer does not report is null.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.engine.engine_setup import resolve_device
from benchmarks.engine.run import Contender, Setup, measured_runs, summed_up, warmed_up, write_outputs
from benchmarks.harness.command import command_parser, run_command, tell
from benchmarks.harness.options import Options, add_run_options
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
    parser = command_parser("peers.hf", __doc__)
    parser.add_argument("name", choices=tuple(PEERS), metavar="NAME", help=", ".join(PEERS))
    add_run_options(parser, repeat=3, outputs=True)
    return run_command(parser, lambda given: measure(given.name, Options.of(given)), arguments)


def measure(name: str, options: Options) -> dict[str, Any]:
    """Load, warm up, repeat, sum up."""
    workload = read_workload(options.workload)
    check_greedy(workload)
    tell(f"loading {options.model} for {name}")
    contender = PEERS[name](load_hf_model(options))
    warmed_up(contender, workload)
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
    return summed_up(setup, workload, runs)


if __name__ == "__main__":
    sys.exit(main())
