"""An open-loop client for any server with the OpenAI API, such as this service or vLLM.

    python -m benchmarks.service.online --base-url http://127.0.0.1:8000 --model demo --workload FILE.jsonl --rate 4 \\
        --slo-ttft-ms 500 --slo-itl-ms 50
    python -m benchmarks.service.online … --sweep 0.8,1,1.5,2,5 --capacity 8 --duration 30

Each request is sent at its arrival time on a connection of its own, however slow the answers are. If the client itself
is late, `lateness_*` shows it. One run prints one JSON object. A sweep makes one run for each multiple of the capacity
and prints a table, then a JSON object with its rows.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.engine.request import FILTERS, Request, SamplingParams
from benchmarks.harness import machine
from benchmarks.harness.answer import Answer, ask, streamed
from benchmarks.harness.command import (
    BenchmarkError,
    above_zero,
    command_parser,
    numbers_above_zero,
    positive,
    run_command,
    tell,
)
from benchmarks.harness.figures import percentile, percentiles, table_of
from benchmarks.harness.http_call import Target
from benchmarks.harness.timeline import Slo, times_of
from benchmarks.harness.workload import Workload, read_workload
from benchmarks.service.arrivals import Arrivals
from deployments.open_files import allow_many_files

_PAUSE_S = 1.0  # between the runs of a sweep
REFUSED = 429
_PLAIN = SamplingParams(max_tokens=1)
LEAD_S = 0.1  # from the start to time zero of the arrivals: the client needs time to create tasks


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run, or of all runs of a sweep. Prints the table of a sweep.

    Raises:
        BenchmarkError: an option is wrong, or no server answers.
    """
    target, workload = Target.parse(given.base_url), read_workload(given.workload)
    arrivals = Arrivals.parse(given.arrival)
    factors = _factors(given)
    rate = given.rate if given.sweep is None else given.capacity
    _check_rate(given, arrivals, workload, rate)
    allow_many_files()  # an open loop against a slow server opens any number of connections
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


_COLUMNS = (
    ("requests/s", "rate", "{:.2f}"), ("goodput", "goodput_requests_per_s", "{:.2f}"),
    ("in SLO", "goodput_share", "{:.0%}"), ("refused", "refused_share", "{:.0%}"),
    ("refusal p50 ms", "refusal_p50_ms", "{:.1f}"), ("p99 ms", "refusal_p99_ms", "{:.1f}"),
    ("TTFT p50", "ttft_p50_s", "{:.3f}"), ("p99", "ttft_p99_s", "{:.3f}"), ("ITL p50", "itl_p50_s", "{:.3f}"),
    ("p99", "itl_p99_s", "{:.3f}"), ("tokens/s", "output_tokens_per_s", "{:,.0f}"),
    ("late p99 ms", "lateness_p99_ms", "{:.1f}"), ("other errors", "others", "{}"),
)  # fmt: skip


def in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the most important figures; the JSON object has all figures."""
    others = [sum(row["errors"].values()) - row["errors"].get(f"status {REFUSED}", 0) for row in rows]
    counted = [{**row, "others": number} for row, number in zip(rows, others, strict=True)]
    return table_of(_COLUMNS, counted, **{"× capacity": [f"{row['factor']:g}" for row in rows]})


def _run(
    given: argparse.Namespace, target: Target, workload: Workload, arrivals: Arrivals, *, rate: float | None
) -> dict[str, Any]:
    played = schedule(given, workload, arrivals, rate=rate)
    slo = Slo(ttft_s=_seconds(given.slo_ttft_ms), itl_s=_seconds(given.slo_itl_ms))
    found = asyncio.run(measured(target, given.model, played, slo=slo, timeout_s=given.timeout_s))
    tell(
        f"{found['num_requests']:,} requests in {found['seconds']:.1f} s: {found['num_answered']:,} answered, "
        f"{found['goodput_requests_per_s']:.2f}/s within the SLO; errors: {found['errors'] or 'none'}; "
        f"this client was late by at most {found['lateness_max_ms']:.1f} ms"
    )
    return {"rate": rate, **found}


async def _warm_up(target: Target, given: argparse.Namespace, workload: Workload) -> None:
    """Send the first requests one after the other, with a salt of their own, so that the run cannot hit their prefixes.

    Raises:
        BenchmarkError: no request succeeds, so the address, the model name or the workload is wrong.
    """
    if not given.warm_up:
        return
    salted = repeated(workload, len(workload.requests) + given.warm_up).requests[len(workload.requests) :]
    requests = [completion_request(target, given.model, timed.request) for timed in salted]
    answers = []
    for request in requests:
        answers += await play(target, [request], [0.0], start_s=time.perf_counter(), timeout_s=given.timeout_s)
    if not any(answer.has_succeeded for answer in answers):
        raise BenchmarkError(f"{given.base_url} does not answer: {answers[-1].in_words}")


def _check_rate(given: argparse.Namespace, arrivals: Arrivals, workload: Workload, rate: float | None) -> None:
    if arrivals.rate is not None:
        raise BenchmarkError(f"--arrival {given.arrival}: give the rate with --rate or --capacity instead")
    if arrivals.kind == "trace" and given.sweep is not None:
        raise BenchmarkError("--arrival trace has its own times; a sweep needs poisson or burst:N")
    if rate is None and arrivals.needs_rate(workload):
        raise BenchmarkError("give the arrival rate: --rate R in requests a second")
    if rate is None and given.duration is not None and arrivals.kind != "trace":
        raise BenchmarkError("--duration needs --rate")


def _factors(given: argparse.Namespace) -> list[float]:
    if given.sweep is None:
        return []
    if given.capacity is None:
        raise BenchmarkError("--sweep needs --capacity: the requests a second of the factor 1")
    return numbers_above_zero("--sweep", given.sweep)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


async def play(
    target: Target,
    requests: Sequence[bytes],
    arrivals_s: Sequence[float],
    *,
    start_s: float,
    timeout_s: float,
) -> list[Answer]:
    """Send each request at `start_s` plus its arrival, and return all answers, complete, in order of arrival.

    The client was late for a request by its `begun_s` less its `arrival_s`.
    """
    tasks = []
    for request, arrival_s in zip(requests, arrivals_s, strict=True):
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        sending = ask(target, request, timeout_s=timeout_s, arrival_s=start_s + arrival_s)
        tasks.append(asyncio.create_task(sending))
    return list(await asyncio.gather(*tasks))


def schedule(given: argparse.Namespace, workload: Workload, arrivals: Arrivals, *, rate: float | None) -> Workload:
    """Return the requests to send, with their times. A workload that is too short is repeated.

    Raises:
        BenchmarkError: a trace is too short (a trace is not repeated), or no request arrives.
    """
    number = _num_needed(given, workload, arrivals, rate)
    if arrivals.kind == "trace" and number > len(workload.requests):
        raise BenchmarkError(f"--arrival trace: the workload has {len(workload.requests):,} requests, not {number:,}")
    arranged = arrivals.arrange(repeated(workload, number), rate=rate, seed=given.seed)
    if given.duration is None:
        return arranged
    in_time = tuple(timed for timed in arranged.requests if timed.arrival_s < given.duration)
    if not in_time:
        raise BenchmarkError(f"no request arrives within --duration {given.duration:g} s; make it longer")
    return Workload(in_time)


def repeated(workload: Workload, number: int) -> Workload:
    """Return `number` requests: the workload in its order, repeated if it is too short.

    Each repetition has a salt of its own, so that prefixes cached by the previous repetition do not match.
    """
    size = len(workload.requests)
    found = []
    for place in range(number):
        timed, copy = workload.requests[place % size], place // size
        if copy:
            name, salt = f"{timed.request.request_id}~{copy}", f"{timed.request.cache_salt}~{copy}"
            timed = replace(timed, request=replace(timed.request, request_id=name, cache_salt=salt))
        found.append(timed)
    return Workload(tuple(found))


def completion_request(target: Target, model: str, request: Request) -> bytes:
    """Return a streaming call of /v1/completions with the request's token ids. A field that other servers may not know
    is left out if it has its default value."""
    sampling = request.sampling
    more = {"model": model, "temperature": sampling.temperature}
    body = streamed(request.prompt_token_ids, sampling.max_tokens, **more)
    if not sampling.is_greedy:
        body["seed"] = sampling.seed
    optional = {
        "ignore_eos": (sampling.ignore_eos, False),
        **{name: (getattr(sampling, name), getattr(_PLAIN, name)) for name in FILTERS},
        "user": (request.tenant, ""),
        "priority": (request.priority, 0),
        "deadline_s": (request.deadline_s, None),
        "cache_salt": (request.cache_salt, ""),
    }
    body |= {name: value for name, (value, nothing) in optional.items() if value != nothing}
    return target.request("completions", body)


def _num_needed(given: argparse.Namespace, workload: Workload, arrivals: Arrivals, rate: float | None) -> int:
    if given.requests is not None:
        return int(given.requests)
    if given.duration is None or arrivals.kind == "trace":
        return len(workload.requests)
    assert rate is not None, "a duration is filled at a rate"
    expected: float = rate * given.duration
    return math.ceil(expected + 6 * math.sqrt(expected)) + arrivals.burst_size + 10  # more than any random draw needs


def online_figures(sent: Sequence[Answer], slo: Slo, *, client_cpu_s: float) -> dict[str, Any]:
    """Return the figures of at least one answer as the client saw it. Shares are from 0 to 1.

    Times are those of complete answers, from the scheduled arrival of the request. `seconds` lasts from the first
    arrival to the last end, so the tail after the last arrival counts. If the client was late (`lateness_*`), do not
    trust the other times.
    """
    answered = [one for one in sent if one.has_succeeded]
    refused = [one for one in sent if one.status == REFUSED]
    seconds = max(one.ended_s for one in sent) - min(one.arrival_s for one in sent)
    num_tokens = sum(one.num_tokens for one in answered)
    num_kept = sum(slo.is_kept(one, one.num_tokens) for one in answered)
    lateness_ms = [(one.begun_s - one.arrival_s) * 1000 for one in sent]
    refusals_ms = [(one.ended_s - one.begun_s) * 1000 for one in refused]
    return {
        "seconds": round(seconds, 3),
        "num_requests": len(sent),
        "num_answered": len(answered),
        "errors": dict(Counter(one.outcome for one in sent if not one.has_succeeded)),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 2),
        "requests_per_s": round(len(answered) / seconds, 3),
        "goodput_requests_per_s": round(num_kept / seconds, 3),
        "goodput_share": round(num_kept / len(sent), 4),  # of all sent requests
        "refused_share": round(len(refused) / len(sent), 4),
        **percentiles("refusal", refusals_ms, (50, 99), unit="ms", digits=3),
        **times_of(answered),
        "lateness_p99_ms": round(percentile(lateness_ms, 99) or 0.0, 3),
        "lateness_max_ms": round(max(lateness_ms), 3),
        "client_cpu_share": round(client_cpu_s / seconds, 3),  # of one core
    }


async def measured(
    target: Target, model: str, workload: Workload, *, slo: Slo | None = None, timeout_s: float
) -> dict[str, Any]:
    """Send every request of a workload at its arrival time and return the figures."""
    # Encode all requests before the clock starts.
    requests = [completion_request(target, model, timed.request) for timed in workload.requests]
    arrivals_s = [timed.arrival_s for timed in workload.requests]
    cpu_began = machine.own_cpu_s()
    sent = await play(target, requests, arrivals_s, start_s=time.perf_counter() + LEAD_S, timeout_s=timeout_s)
    return online_figures(sent, slo or Slo(), client_cpu_s=machine.own_cpu_s() - cpu_began)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.online", __doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="http://HOST:PORT, with or without /v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="model name at the server")
    parser.add_argument("--workload", required=True, metavar="FILE.jsonl", help="one request a line; repeated if short")
    parser.add_argument("--rate", type=above_zero, metavar="R", help="requests a second, on average")
    parser.add_argument("--arrival", default="poisson", metavar="KIND", help="poisson, burst:N or trace")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrival times")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--duration", type=above_zero, metavar="S", help="seconds in which requests arrive")
    extent.add_argument("--requests", type=positive, metavar="N", help="default: the workload once")
    parser.add_argument("--slo-ttft-ms", type=above_zero, metavar="MS", help="limit of the time to the first token")
    parser.add_argument("--slo-itl-ms", type=above_zero, metavar="MS", help="limit of a request's mean ITL")
    parser.add_argument("--sweep", metavar="F,F", help="multiples of the capacity, one run for each")
    parser.add_argument("--capacity", type=above_zero, metavar="R", help="requests a second of the sweep factor 1")
    parser.add_argument("--timeout-s", type=above_zero, default=300.0, metavar="S", help="time limit of one request")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="requests before, with another cache_salt")
    return parser


if __name__ == "__main__":
    sys.exit(main())
