"""Requests sent when their time has come, whatever has become of those before: an open loop.

A client that waits for answers slows down with the server and never sees how bad it gets. This one is late only when it
is overloaded itself, and says so.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.engine.request import Request
from benchmarks.harness import machine
from benchmarks.harness.answer import Answer, ask
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.figures import percentile, percentiles
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import Workload
from benchmarks.service.arrivals import Arrivals

LEAD_S = 0.1  # between the start and the first arrival, for tasks to be made


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of the schedule and what came of it. Seconds of one clock."""

    scheduled_s: float
    answer: Answer

    @property
    def lateness_s(self) -> float:
        """How late the client turned to it."""
        return self.answer.begun_s - self.scheduled_s


async def play(
    target: Target,
    requests: Sequence[bytes],
    arrivals_s: Sequence[float],
    *,
    start_s: float,
    timeout_s: float,
) -> list[Sent]:
    """Send each request at `start_s` plus its arrival, follow every answer to its end, in order of arrival."""
    tasks = []
    for request, arrival_s in zip(requests, arrivals_s, strict=True):
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        tasks.append(asyncio.create_task(ask(target, request, timeout_s=timeout_s)))
    answers = await asyncio.gather(*tasks)
    return [Sent(start_s + arrival_s, answer) for arrival_s, answer in zip(arrivals_s, answers, strict=True)]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a workload is played: so many requests, so many seconds, or (neither) all of it once."""

    num_requests: int | None = None
    duration_s: float | None = None


def schedule(workload: Workload, arrivals: Arrivals, extent: Extent, *, rate: float | None, seed: int) -> Workload:
    """The requests to send and when. A workload that is too short is repeated.

    Raises:
        BenchmarkError: a trace, which has its own times, is too short, or no request arrives.
    """
    number = _num_needed(workload, arrivals, extent, rate)
    if arrivals.kind == "trace" and number > len(workload.requests):
        raise BenchmarkError(f"--arrival trace: the workload has {len(workload.requests):,} requests, not {number:,}")
    arranged = arrivals.arrange(repeated(workload, number), rate=rate, seed=seed)
    if extent.duration_s is None:
        return arranged
    in_time = tuple(timed for timed in arranged.requests if timed.arrival_s < extent.duration_s)
    if not in_time:
        raise BenchmarkError(f"no request arrives within --duration {extent.duration_s:g} s; make it longer")
    return Workload(in_time)


def repeated(workload: Workload, number: int) -> Workload:
    """So many requests in the order of the workload, again and again.

    Each repetition has a salt of its own: what a server keeps of the one before must not answer it.
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
    """A streaming call of /v1/completions with the request's own tokens. What other servers do not know is left out
    wherever it says nothing."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model, "prompt": list(request.prompt_token_ids), "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if not sampling.is_greedy:
        body["seed"] = sampling.seed
    optional = {
        "ignore_eos": (sampling.ignore_eos, False),
        "top_k": (sampling.top_k, 0),
        "top_p": (sampling.top_p, 1.0),
        "min_p": (sampling.min_p, 0.0),
        "user": (request.tenant, ""),
        "priority": (request.priority, 0),
        "deadline_s": (request.deadline_s, None),
        "cache_salt": (request.cache_salt, ""),
    }
    body |= {name: value for name, (value, nothing) in optional.items() if value != nothing}
    return target.request("completions", json.dumps(body).encode())


def _num_needed(workload: Workload, arrivals: Arrivals, extent: Extent, rate: float | None) -> int:
    if extent.num_requests is not None:
        return extent.num_requests
    if extent.duration_s is None or arrivals.kind == "trace":
        return len(workload.requests)
    assert rate is not None, "a duration is filled at a rate"
    expected = rate * extent.duration_s
    return math.ceil(expected + 6 * math.sqrt(expected)) + arrivals.burst_size + 10  # chance stays below this


REFUSED = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must see to count for goodput; None: no bound. Of an answer that came at all, and whole."""

    ttft_s: float | None = None  # first token, from the time it was to be sent
    itl_s: float | None = None  # mean time between its tokens after the first (DistServe's time per output token)

    def is_kept(self, sent: Sent) -> bool:
        answer = sent.answer
        if not answer.has_succeeded:
            return False
        if self.ttft_s is not None and answer.delivered_s[0] - sent.scheduled_s > self.ttft_s:
            return False
        return self.itl_s is None or mean_gap_s(answer) <= self.itl_s


def online_figures(sent: Sequence[Sent], slo: Slo, *, client_cpu_s: float) -> dict[str, Any]:
    """What at least one request comes to, as its client saw it. Shares are from 0 to 1.

    Times are of requests that were answered whole, from when they were to be sent. `seconds` go from the first arrival
    to the last end: what comes after the arrivals counts too. A client that is late (`lateness_*`) casts doubt on the
    other times.
    """
    answered = [one for one in sent if one.answer.has_succeeded]
    refused = [one.answer for one in sent if one.answer.status == REFUSED]
    seconds = max(one.answer.ended_s for one in sent) - min(one.scheduled_s for one in sent)
    num_tokens = sum(one.answer.num_tokens for one in answered)
    num_kept = sum(map(slo.is_kept, sent))
    lateness_ms = [one.lateness_s * 1000 for one in sent]
    refusals_ms = [(answer.ended_s - answer.begun_s) * 1000 for answer in refused]
    return {
        "seconds": round(seconds, 3),
        "num_requests": len(sent),
        "num_answered": len(answered),
        "errors": dict(Counter(one.answer.outcome for one in sent if not one.answer.has_succeeded)),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 2),
        "requests_per_s": round(len(answered) / seconds, 3),
        "goodput_requests_per_s": round(num_kept / seconds, 3),
        "goodput_share": round(num_kept / len(sent), 4),  # of all that were sent
        "refused_share": round(len(refused) / len(sent), 4),
        **percentiles("refusal", refusals_ms, (50, 99), unit="ms", digits=3),
        **percentiles("ttft", [one.answer.delivered_s[0] - one.scheduled_s for one in answered]),
        **percentiles("itl", [gap for one in answered for gap in one.answer.gaps_s]),
        **percentiles("latency", [one.answer.delivered_s[-1] - one.scheduled_s for one in answered]),
        "lateness_p99_ms": round(percentile(lateness_ms, 99) or 0.0, 3),
        "lateness_max_ms": round(max(lateness_ms), 3),
        "client_cpu_share": round(client_cpu_s / seconds, 3),  # of one core
    }


def mean_gap_s(answer: Answer) -> float:
    """Seconds a token after the first took on average; 0 for a single token."""
    after_first = answer.num_tokens - 1
    return (answer.delivered_s[-1] - answer.delivered_s[0]) / after_first if after_first > 0 else 0.0


async def measured(
    target: Target, model: str, workload: Workload, *, slo: Slo | None = None, timeout_s: float
) -> dict[str, Any]:
    """Send every request of a workload at its time; the figures."""
    # Made before the clock runs: the bytes to send, and when.
    requests = [completion_request(target, model, timed.request) for timed in workload.requests]
    arrivals_s = [timed.arrival_s for timed in workload.requests]
    cpu_began = machine.own_cpu_s()
    sent = await play(target, requests, arrivals_s, start_s=time.perf_counter() + LEAD_S, timeout_s=timeout_s)
    return online_figures(sent, slo or Slo(), client_cpu_s=machine.own_cpu_s() - cpu_began)
