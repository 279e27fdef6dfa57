"""An open-loop client for any server that speaks the OpenAI API: ours, vLLM's, others.

    python -m benchmarks.service.online --base-url http://127.0.0.1:8000 --model demo --workload FILE.jsonl --rate 4 \\
        --slo-ttft-ms 500 --slo-itl-ms 50
    python -m benchmarks.service.online … --sweep 0.8,1,1.5,2,5 --capacity 8 --duration 30 --retry-check

Requests are sent when their time comes, however slow the answers are, each on a connection of its own; a late client
shows in `lateness_*`. One run prints one JSON object. A sweep is a run for each multiple of the capacity, one after the
other, and prints a table and then the JSON object with its rows. With --retry-check the same arrivals come once more:
this time refused clients come back exactly when Retry-After said, and some probe for when they could have. That is more
load, so only the `retry` figures are of that run.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError, add_json_option, command_parser, positive, report, tell
from benchmarks.harness.figures import cell, table
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import Workload, read_workload
from benchmarks.service.arrivals import Arrivals
from benchmarks.service.online_figures import OnlineFigures, Slo
from benchmarks.service.open_loop import (
    LEAD_S,
    Extent,
    RetryCheck,
    RetryFigures,
    completion_request,
    play,
    repeated,
    schedule,
)

_PAUSE_S = 1.0  # between the runs of a sweep


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: at which rate, with which figures."""

    factor: float | None  # of the capacity, in a sweep
    rate: float | None  # requests a second; None for a trace
    figures: OnlineFigures
    retry: RetryFigures | None

    def to_dict(self) -> dict[str, Any]:
        head: dict[str, Any] = {} if self.factor is None else {"factor": self.factor}
        tail: dict[str, Any] = {} if self.retry is None else {"retry": asdict(self.retry)}
        return head | {"rate": self.rate} | asdict(self.figures) | tail


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)

    def measured() -> dict[str, Any]:
        outcomes, result = measure(given)
        if given.sweep is not None:
            print(in_words(outcomes))
        return result

    return report(measured, given)


def measure(given: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any]]:
    """All runs, and what is printed of them.

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
    outcomes = []
    for number, factor in enumerate(factors):
        time.sleep(_PAUSE_S if number else 0)
        outcomes.append(_run(given, target, workload, arrivals, factor=factor, rate=rate and rate * (factor or 1)))
    if given.sweep is None:
        return outcomes, outcomes[0].to_dict()
    return outcomes, {"capacity": given.capacity, "rows": [outcome.to_dict() for outcome in outcomes]}


def in_words(outcomes: Sequence[Outcome]) -> str:
    """The figures that most questions hang on; the JSON has them all."""
    heads = ["× capacity", "requests/s", "goodput", "in SLO", "refused", "refusal p50 ms", "p99 ms", "TTFT p50", "p99",
             "ITL p50", "p99", "tokens/s", "other errors", "late p99 ms", "back when told", "error s"]  # fmt: skip
    rows = []
    for outcome in outcomes:
        found, retry = outcome.figures, outcome.retry
        rows.append(
            [
                cell(outcome.factor, "{:g}"),
                cell(outcome.rate, "{:.2f}"),
                f"{found.goodput_requests_per_s:.2f}",
                f"{found.goodput_share:.0%}",
                f"{found.refused_share:.0%}",
                cell(found.refusal_p50_ms, "{:.1f}"),
                cell(found.refusal_p99_ms, "{:.1f}"),
                *(cell(found_s, "{:.3f}") for found_s in (found.ttft_p50_s, found.ttft_p99_s)),
                *(cell(found_s, "{:.3f}") for found_s in (found.itl_p50_s, found.itl_p99_s)),
                f"{found.output_tokens_per_s:,.0f}",
                str(sum(number for name, number in found.errors.items() if name != "429")),
                f"{found.lateness_p99_ms:.1f}",
                cell(None if retry is None else retry.returned_admitted_share, "{:.0%}"),
                cell(None if retry is None else retry.retry_error_median_s, "{:+.2f}"),
            ]
        )
    return table(heads, rows)


def _run(
    given: argparse.Namespace,
    target: Target,
    workload: Workload,
    arrivals: Arrivals,
    *,
    factor: float | None,
    rate: float | None,
) -> Outcome:
    played = schedule(workload, arrivals, Extent(given.requests, given.duration), rate=rate, seed=given.seed)
    slo = Slo(ttft_s=_seconds(given.slo_ttft_ms), itl_s=_seconds(given.slo_itl_ms))
    found = asyncio.run(_measured(given, target, played, slo))
    tell(
        f"{len(played.requests):,} requests in {found.seconds:.1f} s: {found.num_answered:,} answered, "
        f"{found.goodput_requests_per_s:.2f}/s well; errors: {found.errors or 'none'}; "
        f"this client was late by at most {found.lateness_max_ms:.1f} ms"
    )
    retry = asyncio.run(_retried(given, target, played)) if given.retry_check and "429" in found.errors else None
    return Outcome(factor, rate, found, retry)


async def _measured(given: argparse.Namespace, target: Target, played: Workload, slo: Slo) -> OnlineFigures:
    requests, arrivals_s = _prepared(given, target, played)
    cpu_began = machine.own_cpu_s()
    sent = await play(target, requests, arrivals_s, start_s=time.perf_counter() + LEAD_S, timeout_s=given.timeout_s)
    return OnlineFigures.of(sent, slo, client_cpu_s=machine.own_cpu_s() - cpu_began)


async def _retried(given: argparse.Namespace, target: Target, played: Workload) -> RetryFigures:
    """The same arrivals, with refused clients that come back."""
    requests, arrivals_s = _prepared(given, target, played)
    start_s = time.perf_counter() + LEAD_S
    retries = RetryCheck(target, start_s + arrivals_s[-1], given.timeout_s)
    await play(target, requests, arrivals_s, start_s=start_s, timeout_s=given.timeout_s, after=retries.after)
    return retries.figures()


def _prepared(given: argparse.Namespace, target: Target, played: Workload) -> tuple[list[bytes], list[float]]:
    """Everything that can be made before the clock runs: the bytes to send, and when."""
    requests = [completion_request(target, given.model, timed.request) for timed in played.requests]
    return requests, [timed.arrival_s for timed in played.requests]


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


def _factors(given: argparse.Namespace) -> list[float | None]:
    if given.sweep is None:
        return [None]
    if given.capacity is None:
        raise BenchmarkError("--sweep needs --capacity: the requests a second that 1 stands for")
    try:
        factors = [float(part) for part in given.sweep.split(",")]
    except ValueError:
        factors = []
    if not factors or not all(0 < factor <= 1000 for factor in factors):
        raise BenchmarkError(f"--sweep {given.sweep}: write numbers above 0, for example 0.8,1,1.5,2,5")
    return [*factors]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.online", __doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="http://HOST:PORT, with or without /v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="as the server calls it")
    parser.add_argument("--workload", required=True, metavar="FILE.jsonl", help="one request a line; repeated if short")
    parser.add_argument("--rate", type=_above_zero, metavar="R", help="requests a second, on average")
    parser.add_argument("--arrival", default="poisson", metavar="KIND", help="poisson, burst:N or trace")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--duration", type=_above_zero, metavar="S", help="seconds in which requests arrive")
    extent.add_argument("--requests", type=positive, metavar="N", help="default: the workload once")
    parser.add_argument("--slo-ttft-ms", type=_above_zero, metavar="MS", help="first token within")
    parser.add_argument("--slo-itl-ms", type=_above_zero, metavar="MS", help="mean time between a request's tokens")
    parser.add_argument("--sweep", metavar="F,F", help="multiples of the capacity, each a run by itself")
    parser.add_argument("--capacity", type=_above_zero, metavar="R", help="requests a second that 1 in a sweep means")
    parser.add_argument("--retry-check", action="store_true", help="hold the server to its Retry-After")
    parser.add_argument("--timeout-s", type=_above_zero, default=300.0, metavar="S", help="of one request")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="requests before, with another cache_salt")
    add_json_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
