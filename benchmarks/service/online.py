"""An open-loop client for any server that speaks the OpenAI API: ours, vLLM's, others.

    python -m benchmarks.service.online --base-url http://127.0.0.1:8000 --model demo --workload FILE.jsonl --rate 4 \\
        --slo-ttft-ms 500 --slo-itl-ms 50
    python -m benchmarks.service.online … --sweep 0.8,1,1.5,2,5 --capacity 8 --duration 30

Requests are sent when their time comes, however slow the answers are, each on a connection of its own; a late client
shows in `lateness_*`. One run prints one JSON object. A sweep is a run for each multiple of the capacity, one after the
other, and prints a table and then the JSON object with its rows.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.command import (
    BenchmarkError,
    above_zero,
    command_parser,
    numbers_above_zero,
    positive,
    run_command,
    tell,
)
from benchmarks.harness.figures import cell, table
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import Workload, read_workload
from benchmarks.service.arrivals import Arrivals
from benchmarks.service.open_loop import (
    REFUSED,
    Extent,
    Slo,
    completion_request,
    measured,
    play,
    repeated,
    schedule,
)

_PAUSE_S = 1.0  # between the runs of a sweep


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run, or of all runs of a sweep, which are printed as a table.

    Raises:
        BenchmarkError: an option is wrong, or no server answers.
    """
    target, workload = Target.parse(given.base_url), read_workload(given.workload)
    arrivals = Arrivals.parse(given.arrival)
    factors = _factors(given)
    rate = given.rate if given.sweep is None else given.capacity
    _check_rate(given, arrivals, workload, rate)
    _allow_many_connections()
    asyncio.run(_warm_up(target, given, workload))

    def run(factor: float | None) -> dict[str, Any]:
        return _run(given, target, workload, arrivals, rate=rate and rate * (factor or 1))

    if not factors:
        return run(None)
    rows = []
    for number, factor in enumerate(factors):
        time.sleep(_PAUSE_S if number else 0)
        rows.append({"factor": factor, **run(factor)})
    print(in_words(rows))
    return {"capacity": given.capacity, "rows": rows}


# Heads of the table, the figures below them and how they are written.
_COLUMNS = (
    ("× capacity", "factor", "{:g}"), ("requests/s", "rate", "{:.2f}"), ("goodput", "goodput_requests_per_s", "{:.2f}"),
    ("in SLO", "goodput_share", "{:.0%}"), ("refused", "refused_share", "{:.0%}"),
    ("refusal p50 ms", "refusal_p50_ms", "{:.1f}"), ("p99 ms", "refusal_p99_ms", "{:.1f}"),
    ("TTFT p50", "ttft_p50_s", "{:.3f}"), ("p99", "ttft_p99_s", "{:.3f}"), ("ITL p50", "itl_p50_s", "{:.3f}"),
    ("p99", "itl_p99_s", "{:.3f}"), ("tokens/s", "output_tokens_per_s", "{:,.0f}"),
    ("late p99 ms", "lateness_p99_ms", "{:.1f}"),
)  # fmt: skip


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures that most questions hang on; the JSON has them all."""
    heads = [*(head for head, _, _ in _COLUMNS), "other errors"]
    cells = [
        [*(cell(row[name], form) for _, name, form in _COLUMNS),
         str(sum(number for name, number in row["errors"].items() if name != str(REFUSED)))]
        for row in rows
    ]  # fmt: skip
    return table(heads, cells)


def _run(
    given: argparse.Namespace, target: Target, workload: Workload, arrivals: Arrivals, *, rate: float | None
) -> dict[str, Any]:
    played = schedule(workload, arrivals, Extent(given.requests, given.duration), rate=rate, seed=given.seed)
    slo = Slo(ttft_s=_seconds(given.slo_ttft_ms), itl_s=_seconds(given.slo_itl_ms))
    found = asyncio.run(measured(target, given.model, played, slo=slo, timeout_s=given.timeout_s))
    tell(
        f"{found['num_requests']:,} requests in {found['seconds']:.1f} s: {found['num_answered']:,} answered, "
        f"{found['goodput_requests_per_s']:.2f}/s well; errors: {found['errors'] or 'none'}; "
        f"this client was late by at most {found['lateness_max_ms']:.1f} ms"
    )
    return {"rate": rate, **found}


async def _warm_up(target: Target, given: argparse.Namespace, workload: Workload) -> None:
    """The first requests, one after the other, under a salt of their own: their prefixes must not be known later.

    Raises:
        BenchmarkError: none is answered, so it is the address, the model's name or the workload.
    """
    if not given.warm_up:
        return
    salted = repeated(workload, len(workload.requests) + given.warm_up).requests[len(workload.requests) :]
    requests = [completion_request(target, given.model, timed.request) for timed in salted]
    answers = []
    for request in requests:
        answers += await play(target, [request], [0.0], start_s=time.perf_counter(), timeout_s=given.timeout_s)
    if not any(one.answer.has_succeeded for one in answers):
        last = answers[-1].answer
        raise BenchmarkError(f"{given.base_url} does not answer: {last.outcome}: {(last.failure or '').strip()}")


def _allow_many_connections() -> None:
    """An open loop against a slow server has as many connections as it likes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check_rate(given: argparse.Namespace, arrivals: Arrivals, workload: Workload, rate: float | None) -> None:
    if arrivals.rate is not None:
        raise BenchmarkError(f"--arrival {given.arrival}: the rate is said by --rate or --capacity here")
    if arrivals.kind == "trace" and given.sweep is not None:
        raise BenchmarkError("--arrival trace has its own times; a sweep needs poisson or burst:N")
    if rate is None and arrivals.needs_rate(workload):
        raise BenchmarkError("say how fast requests come: --rate R in requests a second")
    if rate is None and given.duration is not None and arrivals.kind != "trace":
        raise BenchmarkError("--duration needs --rate")


def _factors(given: argparse.Namespace) -> list[float]:
    if given.sweep is None:
        return []
    if given.capacity is None:
        raise BenchmarkError("--sweep needs --capacity: the requests a second that 1 stands for")
    return numbers_above_zero("--sweep", given.sweep)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.online", __doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="http://HOST:PORT, with or without /v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="as the server calls it")
    parser.add_argument("--workload", required=True, metavar="FILE.jsonl", help="one request a line; repeated if short")
    parser.add_argument("--rate", type=above_zero, metavar="R", help="requests a second, on average")
    parser.add_argument("--arrival", default="poisson", metavar="KIND", help="poisson, burst:N or trace")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--duration", type=above_zero, metavar="S", help="seconds in which requests arrive")
    extent.add_argument("--requests", type=positive, metavar="N", help="default: the workload once")
    parser.add_argument("--slo-ttft-ms", type=above_zero, metavar="MS", help="first token within")
    parser.add_argument("--slo-itl-ms", type=above_zero, metavar="MS", help="mean time between a request's tokens")
    parser.add_argument("--sweep", metavar="F,F", help="multiples of the capacity, each a run by itself")
    parser.add_argument("--capacity", type=above_zero, metavar="R", help="requests a second that 1 in a sweep means")
    parser.add_argument("--timeout-s", type=above_zero, default=300.0, metavar="S", help="of one request")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="requests before, with another cache_salt")
    return parser


if __name__ == "__main__":
    sys.exit(main())
