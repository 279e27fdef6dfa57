"""Reads and scales traces (the arrival times and lengths of requests).

A trace can be read from a CSV file with Azure's columns, a workload file, a step log, or an access log.

`azure-conv` and `azure-code` are the first 1,000 requests of the Azure LLM inference traces of November 2023
(Azure/AzurePublicDataset, CC-BY 4.0, Microsoft; Patel et al., "Splitwise", ISCA 2024).
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from app.engine.request import Request, SamplingParams
from app.engine.trace.entries import NOTHING, Arrival, Header, RedactedArrival, StepRecord, parse
from app.errors import InvalidSetup
from deployments.plan.access_log import is_access_log, read_access_log, seconds_of

_FOLDER = Path(__file__).resolve().parent
BUILT_IN = {"azure-conv": _FOLDER / "azure_conv_2023.csv", "azure-code": _FOLDER / "azure_code_2023.csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """A request in a trace."""

    arrival_s: float  # seconds after the trace's first request
    num_prompt_tokens: int
    num_output_tokens: int  # tokens that it generates
    max_tokens: int  # its limit, at least `num_output_tokens`
    prompt_token_ids: tuple[int, ...] | None = None  # None for a prompt that shares no prefix
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    session: str = ""
    next_turn: TracedRequest | None = None  # arrives `arrival_s` after the end of this request

    def request(self, number: int) -> Request:
        """Return a request for the engine. `number` is its id, and its first token if the prompt is unknown."""
        prompt = self.prompt_token_ids
        return Request(
            request_id=str(number),
            prompt_token_ids=(number, *(0,) * (self.num_prompt_tokens - 1)) if prompt is None else prompt,
            sampling=SamplingParams(max_tokens=self.max_tokens, temperature=0.0),
            tenant=self.tenant,
            priority=self.priority,
            deadline_s=self.deadline_s,
            session=self.session,
        )

    @property
    def num_tokens(self) -> int:
        """The maximum number of tokens, including the output."""
        return self.num_prompt_tokens + self.max_tokens

    def at(self, arrival_s: float) -> TracedRequest:
        return replace(self, arrival_s=arrival_s)


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedRequests(Sequence[TracedRequest]):
    """All or some requests of an endlessly repeated cycle, at any speed.

    Requests are created on access and only `numbers` uses memory, so that ten million requests are cheap.
    """

    cycle: Sequence[TracedRequest]
    numbers: range | NDArray[np.int64]  # ascending; request n repeats `cycle[n % len(cycle)]`
    cycle_s: float
    slowness: float = 1.0  # factor for all arrival times

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> TracedRequest: ...
    @overload
    def __getitem__(self, place: slice) -> RepeatedRequests: ...
    def __getitem__(self, place: int | slice) -> TracedRequest | RepeatedRequests:
        if isinstance(place, slice):
            return replace(self, numbers=self.numbers[place])
        return self._request(int(self.numbers[place]))

    def __iter__(self) -> Iterator[TracedRequest]:
        return (self._request(int(number)) for number in self.numbers)

    def _request(self, number: int) -> TracedRequest:
        copy, place = divmod(number, len(self.cycle))
        traced = self.cycle[place]
        return traced.at((traced.arrival_s + copy * self.cycle_s) * self.slowness)

    def thinned(self, share: float) -> RepeatedRequests:
        """Return a random sample with about `share` of the requests. Sessions are kept or dropped as a whole."""
        numbers = np.asarray(self.numbers)
        drawn = np.random.default_rng(1).random(len(numbers), dtype=np.float32)
        if any(each.session for each in self.cycle):
            of_sessions = np.array([_drawn_by(each.session) for each in self.cycle])[numbers % len(self.cycle)]
            drawn = np.where(np.isnan(of_sessions), drawn, of_sessions)
        return replace(self, numbers=numbers[drawn < share])

    def mean(self, value: Callable[[TracedRequest], int]) -> float:
        places = np.asarray(self.numbers) % len(self.cycle)
        counts = np.bincount(places, minlength=len(self.cycle))
        return float(counts @ np.array([value(each) for each in self.cycle]) / len(places))


def _drawn_by(session: str) -> float:
    """Return a number in [0, 1) that depends only on the session's name, or NaN for no session."""
    return random.Random(session).random() if session else float("nan")


@dataclass(frozen=True, slots=True)
class Trace:
    """A sequence of at least one request, in order of arrival. The first request arrives at 0."""

    name: str
    requests: Sequence[TracedRequest]

    @property
    def seconds(self) -> float:
        """The time from the first to the last arrival plus a mean gap, or 0 if all requests arrive simultaneously."""
        last = self.requests[-1].arrival_s
        return last * len(self.requests) / (len(self.requests) - 1) if last else 0.0

    @property
    def rate(self) -> float:
        """Requests per second; infinite if all requests arrive simultaneously."""
        return len(self.requests) / self.seconds if self.seconds else float("inf")

    @property
    def mean_prompt_tokens(self) -> float:
        return self._repeated.mean(lambda each: each.num_prompt_tokens)

    @property
    def mean_output_tokens(self) -> float:
        return self._repeated.mean(lambda each: each.num_output_tokens)

    @property
    def _repeated(self) -> RepeatedRequests:
        requests = self.requests
        if isinstance(requests, RepeatedRequests):
            return requests
        return RepeatedRequests(requests, range(len(requests)), self.seconds)

    def first(self, number: int) -> Trace:
        """Return the first `number` requests, or all if there are fewer."""
        return Trace(self.name, self.requests[:number])

    def repeated(self, number: int) -> Trace:
        """Return this trace, repeated or shortened to `number` requests."""
        requests = tuple(self.requests)
        return Trace(self.name, RepeatedRequests(requests, range(number), self.seconds))

    def thinned(self, share: float) -> Trace:
        """Return a random sample with about `share` of the requests, at least one. Times do not change."""
        kept = self._repeated.thinned(share)
        return Trace(self.name, kept if len(kept) else self.requests[:1])

    def at_rate(self, rate: float) -> Trace:
        """Scale all gaps so that `rate` requests arrive per second. At an infinite rate, all arrive simultaneously."""
        factor, repeated = self.rate / rate, self._repeated
        if factor == 1.0 or not self.seconds:
            return self
        return Trace(self.name, replace(repeated, slowness=repeated.slowness * factor))

    def with_lengths(self, factor: float) -> Trace:
        """Scale the lengths of prompts and outputs, to at least one token. The prompts' token ids are dropped."""
        if factor == 1.0:
            return self
        return Trace(self.name, tuple(_with_lengths(each, factor) for each in self.requests))

    def check_lengths(self, max_model_len: int) -> None:
        """Raise InvalidSetup if a request may have more than `max_model_len` tokens."""
        longest = max(self.requests, key=lambda each: each.num_tokens)
        if longest.num_tokens > max_model_len:
            num_long = sum(each.num_tokens > max_model_len for each in self.requests)
            factor = max_model_len / (longest.num_tokens + 2)  # + 2 because rounding may add a token to both
            raise InvalidSetup(
                f"{self.name}: {num_long:,} of {len(self.requests):,} requests do not fit: the longest has "
                f"{longest.num_prompt_tokens:,} prompt tokens and {longest.max_tokens:,} tokens to generate, but this "
                f"engine accepts {max_model_len:,} in total. Use a model with a longer context or more KV memory, or "
                f"shorten all requests with --lengths {int(factor * 1000) / 1000:g}"
            )


def _with_lengths(request: TracedRequest, factor: float) -> TracedRequest:
    num_prompt, num_output, max_tokens = (
        max(1, round(number * factor))
        for number in (request.num_prompt_tokens, request.num_output_tokens, request.max_tokens)
    )
    return replace(
        request,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        max_tokens=max(max_tokens, num_output),
        prompt_token_ids=None,
    )


def read_trace(place: str) -> Trace:
    """Read a built-in trace by name, or a file in a supported format, which is detected from the first line.

    Raises InvalidSetup if the file cannot be read or contains no requests, or if a line is invalid or out of order.
    """
    path = BUILT_IN.get(place, Path(place).expanduser())
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            requests = list(_reader_of(first)(file, place))
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(BUILT_IN)
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidSetup(f"--trace {place}: {reason}; built-in traces are {names}") from error
    if not requests:
        raise InvalidSetup(f"--trace {place}: the file contains no requests; a plan needs at least one")
    _check_order(place, requests)
    start = requests[0].arrival_s
    return Trace(Path(place).stem, tuple(each.at(each.arrival_s - start) for each in requests))


def _check_order(place: str, requests: Iterable[TracedRequest]) -> None:
    for number, (before, after) in enumerate(pairwise(requests), start=2):
        if after.arrival_s < before.arrival_s:
            raise InvalidSetup(
                f"--trace {place}: request {number:,} arrives {before.arrival_s - after.arrival_s:.3f} s before "
                f"request {number - 1:,}; sort the file by arrival"
            )


def _reader_of(first_line: str) -> Callable[[Iterable[str], str], Iterator[TracedRequest]]:
    if is_access_log(first_line):
        return _of_access_log
    if not first_line.lstrip().startswith("{"):
        return _of_csv
    return _of_step_log if '"step_log"' in first_line else _of_workload


def _of_csv(lines: Iterable[str], place: str) -> Iterator[TracedRequest]:
    rows = csv.DictReader(lines)
    csv_columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    missing = [name for name in csv_columns if name not in (rows.fieldnames or ())]
    if missing and rows.fieldnames:
        raise InvalidSetup(
            f"--trace {place} has no column {missing[0]}; the columns {', '.join(csv_columns)} are required"
        )
    for row in rows:
        try:
            at_s = seconds_of(row["TIMESTAMP"])
            num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            yield _traced(at_s, num_prompt, num_output)
        except (ValueError, TypeError) as error:
            raise InvalidSetup(f"--trace {place}:{rows.line_num}: {error}") from error


def _of_access_log(lines: Iterable[str], place: str) -> Iterator[TracedRequest]:
    for logged in read_access_log(lines, place):
        yield _traced(logged.arrival_s, logged.num_prompt_tokens, logged.num_output_tokens)


def _of_workload(lines: Iterable[str], place: str) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            given: dict[str, Any] = json.loads(line)
            prompt = tuple(given["prompt_token_ids"])
            traced = _traced(float(given.get("arrival_s", 0.0)), len(prompt), int(given["max_tokens"]))
        except KeyError as error:
            raise InvalidSetup(f"--trace {place}:{number}: there is no field {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidSetup(f"--trace {place}:{number}: {error}") from error
        names = ("tenant", "priority", "deadline_s", "session")
        yield replace(traced, prompt_token_ids=prompt, **{name: given[name] for name in names if name in given})


def _traced(arrival_s: float, num_prompt: int, num_output: int) -> TracedRequest:
    if num_prompt < 1 or num_output < 1 or not 0 <= arrival_s < float("inf"):
        raise ValueError(
            f"got {num_prompt:,} prompt tokens and {num_output:,} generated tokens at {arrival_s:g} s; each request "
            f"needs at least one prompt token and one generated token, at 0 s or later"
        )
    return TracedRequest(
        arrival_s=arrival_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output, max_tokens=num_output
    )


def _of_step_log(lines: Iterable[str], place: str) -> Iterator[TracedRequest]:
    """Yield the logged requests, including aborted ones, with as many output tokens as were logged."""
    arrivals: list[Arrival | RedactedArrival] = []
    num_drawn: dict[int, int] = {}
    last = NOTHING
    for number, line in enumerate(lines, start=1):
        try:
            entry = Header.parse(line) if number == 1 else parse(line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidSetup(f"--trace {place}:{number}: this is not an entry of a step log: {error}") from error
        if isinstance(entry, Arrival | RedactedArrival):
            arrivals.append(entry)
        elif isinstance(entry, StepRecord):
            before, last = last, last.next_decode_step() if entry.scheduled is None else entry.scheduled
            for drawer, _ in entry.drawn(last, before):
                num_drawn[drawer] = num_drawn.get(drawer, 0) + 1
    for arrival in arrivals:
        if num_drawn.get(arrival.number):  # none if the request was refused or the log ends before its first token
            yield _of_arrival(arrival, num_drawn[arrival.number])


def _of_arrival(arrival: Arrival | RedactedArrival, num_output: int) -> TracedRequest:
    if isinstance(arrival, Arrival):
        request = arrival.request
        return TracedRequest(
            arrival_s=arrival.at,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=num_output,
            max_tokens=max(num_output, request.sampling.max_tokens),
            prompt_token_ids=request.prompt_token_ids,
            tenant=request.tenant,
            priority=request.priority,
            deadline_s=request.deadline_s,
            session=request.session,
        )
    given = arrival.request
    return TracedRequest(
        arrival_s=arrival.at,
        num_prompt_tokens=given["num_prompt_tokens"],
        num_output_tokens=num_output,
        max_tokens=max(num_output, given["sampling"]["max_tokens"]),
        tenant=given.get("tenant", ""),
        priority=given.get("priority", 0),
        deadline_s=given.get("deadline_s"),
        session=given.get("session", ""),
    )
