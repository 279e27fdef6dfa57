"""How large a fleet the planner simulates: all requests on all replicas, in parts, and a part that stands for them.

    python -m benchmarks.service.plan_scale --costs FILE [--replicas 1000] [--requests 1000000] [--load 0.7]

Azure's conversations of November 2023 (the first 1,000, again and again; prompts and outputs times --lengths) on
replicas with the step times of --costs, a file of `python -m deployments.plan trace` or `service.plan_error`. Prints
seconds, of the CPU too, and the most memory of all processes together. --part-only leaves the whole out.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.config import CacheConfig, SchedulerConfig
from app.cores import num_cores
from benchmarks.harness.command import command_parser, positive, run_command, tell
from deployments.plan.planner import full_rate
from deployments.plan.simulation import SimulatedRun, simulate
from deployments.plan.step_cost import MeasuredReplica
from deployments.plan.traces import read_trace
from deployments.plan.whole_fleet import WholeFleet

_NUM_IN_PART = 100_000  # requests, about


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.plan_scale", __doc__)
    parser.add_argument("--costs", required=True, metavar="FILE", help="measured step times")
    parser.add_argument("--replicas", type=positive, default=1000, metavar="N")
    parser.add_argument("--requests", type=positive, default=1_000_000, metavar="N")
    parser.add_argument("--load", type=float, default=0.7, metavar="F", help="of what the replicas can do")
    parser.add_argument("--lengths", type=float, default=0.1, metavar="F", help="of the trace's prompts and outputs")
    parser.add_argument("--dispatch", default="least_loaded", metavar="NAME")
    parser.add_argument("--processes", type=positive, default=num_cores(), metavar="N")
    parser.add_argument("--part-only", action="store_true", help="simulate no more than the part")
    return run_command(parser, measured, arguments)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    replica, scheduler, cache = MeasuredReplica.read(Path(given.costs)), SchedulerConfig(), CacheConfig()
    trace = read_trace("azure-conv").with_lengths(given.lengths)
    rate = given.load * given.replicas * full_rate(trace, replica, scheduler, cache)
    trace = trace.repeated(given.requests).at_rate(rate)
    num_in_part = max(8, min(32, _NUM_IN_PART * given.replicas // given.requests))
    found = {"rate": rate}
    found["part"] = _timed(
        lambda: simulate(
            trace, replica, scheduler, cache, num_replicas=given.replicas, dispatch=given.dispatch,
            max_replicas=num_in_part,
        ),
        num_children=0,
    )  # fmt: skip
    if not given.part_only:
        fleet = WholeFleet(
            trace=trace, measured=replica, scheduler=scheduler, cache=cache, dispatch=given.dispatch,
            num_replicas=given.replicas,
        )  # fmt: skip
        found["whole"] = _timed(
            lambda: fleet.simulate(num_processes=given.processes), num_children=given.processes
        )  # fmt: skip
    return found


def _timed(run: Callable[[], SimulatedRun], *, num_children: int) -> dict[str, Any]:
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    found = run()
    figures = {
        "seconds": round(time.perf_counter() - began_s, 1),
        "cpu_s": round(_cpu_s() - cpu_s, 1),
        "peak_gb": round(_peak_bytes(num_children) / 1e9, 2),
        "replicas_share": found.share,
        "num_requests": found.num_requests,
        "num_refused": found.num_refused,
        "tokens_per_s": round(found.output_tokens_per_s),
        **{
            f"{metric}_p{percent}_ms": round(1000 * found.percentile_s(metric, percent), 4)
            for metric in ("ttft", "itl")
            for percent in (50, 99)
        },
    }
    tell(str(figures))
    return figures


def _cpu_s() -> float:
    return sum(
        each.ru_utime + each.ru_stime
        for each in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def _peak_bytes(num_children: int) -> int:
    """At most, of this process and its children: each child counts as the largest of them."""
    own, children = (
        resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own + num_children * children


if __name__ == "__main__":
    sys.exit(main())
