"""Requests sent when their time has come, whatever has become of those before: an open loop.

A client that waits for answers slows down with the server and never sees how bad it gets. This one is late only when it
is overloaded itself, and says so.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.engine.request import Request
from benchmarks.harness.answer import Answer, ask
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import Workload
from benchmarks.service.arrivals import Arrivals

LEAD_S = 0.1  # between the start and the first arrival, for tasks to be made

AfterAnswer = Callable[[bytes, Answer], Awaitable[None]]


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
    after: AfterAnswer | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sent]:
    """Send each request at `start_s` plus its arrival, follow every answer to its end, in order of arrival.

    `after` is awaited after each answer, before this returns; it delays no arrival.
    """

    async def follow(request: bytes) -> Answer:
        answer = await ask(target, request, timeout_s=timeout_s, clock=clock)
        if after is not None:
            await after(request, answer)
        return answer

    tasks = []
    for request, arrival_s in zip(requests, arrivals_s, strict=True):
        await asyncio.sleep(start_s + arrival_s - clock())
        tasks.append(asyncio.create_task(follow(request)))
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
PROBE_EVERY = 10  # refusals for each one that is probed
PROBE_GAP_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryFigures:
    """What the promises were worth. Only those that fell due while requests still arrived are counted."""

    num_returned: int  # came back when told
    returned_admitted_share: float | None
    num_probed: int  # let in before the arrivals ended
    num_never_admitted: int  # probed in vain until the arrivals ended
    # Promised less earliest possible, in seconds: above 0 when the client could have come earlier.
    retry_error_median_s: float | None
    retry_error_median_absolute_s: float | None
    num_not_due: int  # told to come back after the last arrival: not waited for
    num_without_promise: int  # 429 without a Retry-After in seconds


@dataclass(slots=True)
class RetryCheck:
    """Follows refused requests of one run; give `after` to `open_loop.play`."""

    target: Target
    ends_s: float  # when the last request arrives, by the clock
    timeout_s: float
    probe_every: int = PROBE_EVERY
    probe_gap_s: float = PROBE_GAP_S
    clock: Callable[[], float] = time.perf_counter
    _num_refused: int = 0
    _is_probing: bool = False
    _num_not_due: int = 0
    _num_without_promise: int = 0
    _num_never_admitted: int = 0
    _admitted: list[bool] = field(default_factory=list)
    _errors_s: list[float] = field(default_factory=list)

    async def after(self, request: bytes, answer: Answer) -> None:
        """Come back with a request that was refused, or probe for it; nothing for others."""
        if answer.status != REFUSED or answer.answered_s is None:
            return
        if answer.retry_after_s is None:
            self._num_without_promise += 1
            return
        promised_s = answer.answered_s + answer.retry_after_s
        if promised_s > self.ends_s:  # no other request arrives by then: the promise would be kept in any case
            self._num_not_due += 1
            return
        self._num_refused += 1
        if not self._is_probing and self._num_refused % self.probe_every == 1 % self.probe_every:
            await self._probe(request, promised_s)
        else:
            await self._come_back(request, promised_s)

    def figures(self) -> RetryFigures:
        errors = self._errors_s
        return RetryFigures(
            num_returned=len(self._admitted),
            returned_admitted_share=round(statistics.mean(self._admitted), 4) if self._admitted else None,
            num_probed=len(errors),
            num_never_admitted=self._num_never_admitted,
            retry_error_median_s=round(statistics.median(errors), 4) if errors else None,
            retry_error_median_absolute_s=round(statistics.median(map(abs, errors)), 4) if errors else None,
            num_not_due=self._num_not_due,
            num_without_promise=self._num_without_promise,
        )

    async def _come_back(self, request: bytes, promised_s: float) -> None:
        await asyncio.sleep(promised_s - self.clock())
        answer = await ask(self.target, request, timeout_s=self.timeout_s, clock=self.clock)
        self._admitted.append(answer.status == 200)

    async def _probe(self, request: bytes, promised_s: float) -> None:
        self._is_probing = True
        while self.clock() < self.ends_s:
            await asyncio.sleep(self.probe_gap_s)
            answer = await ask(
                self.target,
                request,
                timeout_s=self.timeout_s,
                on_status=partial(self._note_probe, promised_s),
                clock=self.clock,
            )
            if answer.status == 200:
                return
        self._num_never_admitted += 1
        self._is_probing = False

    def _note_probe(self, promised_s: float, answer: Answer) -> None:
        if answer.status == 200:
            self._errors_s.append(promised_s - answer.begun_s)
            self._is_probing = False  # the next may begin while this one is being served
