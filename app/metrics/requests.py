"""Measures one ingress's requests, without looking up any label per token.

Each ingress process owns a `RequestMetrics`. The sum of their snapshots describes the service as its callers see it.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any

from app.engine.histogram import SECONDS, SMALL_NUMBERS, TOKENS, Distribution, Histogram, sum_distributions
from app.engine.request import FinishReason
from app.errors import CarouselError, Failure, Overloaded

Clock = Callable[[], float]

NO_IDLE_SLOT = "no_idle_slot"  # reason for refusing a background call, such as a batch line, when no slot is free
NO_MODEL = ""  # model name of calls that were refused before their model was known
BOUNDS = {
    "token_s": SECONDS,
    "decode_s": SECONDS,
    "prompt_tokens": TOKENS,
    "generated_tokens": TOKENS,
    "longest_choice_tokens": TOKENS,
    "num_choices": SMALL_NUMBERS,
    "deltas_per_frame": SMALL_NUMBERS,
}


# Reasons why a request resumes on another replica after a loss (`ReplicaLost` in app/fleet).
LOSSES = ("broken", "ended", "engine_failed", "gap", "silent", "stuck")
_FOREGROUND, _BACKGROUND = "foreground", "background"
Kind = tuple[str, str]  # kind of a request: the group of its replica, and `_FOREGROUND` or `_BACKGROUND`


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """The latencies of one kind of request."""

    queue_s: Distribution  # from the arrival at the replica to the first step, as measured by the replica
    first_token_s: Distribution  # from the arrival of the call to a request's first token
    inter_token_s: Distribution  # between two tokens of a request
    request_s: Distribution  # from the arrival of the call to the end of a request that finished

    def __add__(self, other: Latencies) -> Latencies:
        names = [field.name for field in fields(self)]
        return Latencies(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """The requests of one model since the ingress started. A call with `n` choices counts as `n` requests."""

    num_in_flight: int
    num_generated_tokens: int
    finished: Mapping[str, int]  # requests by finish reason, including aborted and failed requests
    refused: Mapping[str, int]  # calls that ended with an error before their first token, by error
    failed: Mapping[str, int]  # calls that ended with an error after their first token, by error
    dispatched: Mapping[str, int]  # dispatch decisions by policy
    resumed: Mapping[str, int]  # requests that resumed on another replica, by reason
    latencies: Mapping[Kind, Latencies]
    token_s: Distribution  # a request's mean time per token after its first token
    decode_s: Distribution  # from a request's first token to its end
    prompt_tokens: Distribution  # for requests that received a token, or finished without needing one
    generated_tokens: Distribution  # for finished requests
    longest_choice_tokens: Distribution  # for finished calls
    num_choices: Distribution  # for all calls that were not refused
    deltas_per_frame: Distribution  # number of requests with tokens in one frame from a replica

    def __add__(self, other: ModelSnapshot) -> ModelSnapshot:
        names = [field.name for field in fields(self)]
        return ModelSnapshot(**{name: _sum(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def first_token_s(self) -> Distribution:
        """Times to the first token over all kinds of requests."""
        return sum_distributions((each.first_token_s for each in self.latencies.values()), SECONDS)

    @property
    def inter_token_s(self) -> Distribution:
        return sum_distributions((each.inter_token_s for each in self.latencies.values()), SECONDS)

    @property
    def request_s(self) -> Distribution:
        return sum_distributions((each.request_s for each in self.latencies.values()), SECONDS)


def _sum(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Mapping):
        both = {key: mine[key] + theirs[key] for key in mine.keys() & theirs.keys()}
        return {key: both.get(key) or mine.get(key) or theirs.get(key) or 0 for key in sorted({*mine, *theirs})}
    return mine + theirs


Snapshot = Mapping[str, ModelSnapshot]  # by the model's name


def num_counted(snapshot: Snapshot) -> int:
    """Return a sum that never decreases, which shows which of an ingress's snapshots is newer."""
    return sum(
        each.num_generated_tokens
        + sum(sum(counts.values()) for counts in (each.finished, each.refused, each.failed, each.dispatched))
        for each in snapshot.values()
    )


def without_requests(snapshot: Snapshot) -> Snapshot:
    """Return a stopped ingress's snapshot without requests in flight, because they ended with the ingress."""
    return {name: replace(each, num_in_flight=0) for name, each in snapshot.items()}


def merge(snapshots: Iterable[Snapshot]) -> dict[str, ModelSnapshot]:
    """Return the sum of several ingresses' snapshots, by model."""
    merged: dict[str, ModelSnapshot] = {}
    for snapshot in snapshots:
        for name, model in snapshot.items():
            merged[name] = merged[name] + model if name in merged else model
    return merged


class RequestMetrics:
    """The measurements of this process, by model. Used in one event loop only."""

    def __init__(self, model_names: Iterable[str] = (), *, clock: Clock = time.perf_counter) -> None:
        """Report the named models from the start, with zeros. Other models appear with their first request."""
        self.clock = clock  # also the clock of the arrival times for `CallMetrics`
        self._models: dict[str, ModelMetrics] = {}
        for name in model_names:
            self.model(name)

    def model(self, name: str) -> ModelMetrics:
        """Return one model's metrics. Creates them if the model is new."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self.clock)
        return self._models[name]

    def snapshot(self) -> dict[str, ModelSnapshot]:
        """Return immutable copies by model, which can be sent to another process and merged with other snapshots."""
        return {name: model.snapshot() for name, model in self._models.items()}


class ModelMetrics:
    """Counts and measures the requests of one model."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_in_flight = 0
        self.num_generated_tokens = 0
        self.finished = Counter({reason.value: 0 for reason in FinishReason})
        self.latencies = defaultdict[Kind, _LatencyHistograms](_LatencyHistograms)
        _ = self.latencies["", _FOREGROUND]  # created here, so that it is reported with zeros before any request
        self.histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        # Counters for alerts start at 0, because Prometheus sees no increase in a counter that first appears with 1.
        self._refused = Counter(dict.fromkeys(_SERVICE_REASONS, 0))
        self._failed = Counter(dict.fromkeys(_SERVICE_REASONS, 0))
        self._dispatched: Counter[str] = Counter()
        self._resumed = Counter(dict.fromkeys(LOSSES, 0))

    def refused(self, error: Exception, *, is_background: bool = False) -> None:
        """Count a call with an error before its first token. A background call's overload counts as `NO_IDLE_SLOT`."""
        finds_no_slot = is_background and isinstance(error, Overloaded)
        self._refused[NO_IDLE_SLOT if finds_no_slot else reason_of(error)] += 1

    def failed(self, error: Exception) -> None:
        """Count a call that ended with an error after its first token."""
        self._failed[reason_of(error)] += 1

    def dispatched(self, reason: str) -> None:
        """Count a request that was sent to a replica. `reason` is the name of the policy."""
        self._dispatched[reason] += 1

    def resumed(self, reason: str) -> None:
        """Count a request that resumes on another replica. `reason` comes from its `ReplicaLost`."""
        self._resumed[reason] += 1

    def frame_received(self, num_deltas: int) -> None:
        """Count a frame from a replica that carries deltas for `num_deltas` requests."""
        self.histograms["deltas_per_frame"].observe(num_deltas)

    def snapshot(self) -> ModelSnapshot:
        """Return an immutable copy of all counts and histograms."""
        return ModelSnapshot(
            num_in_flight=self.num_in_flight,
            num_generated_tokens=self.num_generated_tokens,
            finished=dict(self.finished),
            refused=dict(self._refused),
            failed=dict(self._failed),
            dispatched=dict(self._dispatched),
            resumed=dict(self._resumed),
            latencies={kind: each.snapshot() for kind, each in self.latencies.items()},
            **{name: histogram.snapshot() for name, histogram in self.histograms.items()},
        )


class CallMetrics:
    """Measures one call. Use it as a context manager around the answer, and report tokens and ends as they occur.

    On exit, unfinished requests count as failed if an error was raised after the first token, and as refused if it was
    raised before. Without an error, or after a cancellation, they count as aborted.
    """

    __slots__ = (
        "_arrived_at", "_class", "_clock", "_ended_at", "_first_at", "_model", "_num_open", "_requests",
    )  # fmt: skip

    def __init__(
        self, model: ModelMetrics, prompt_tokens: Sequence[int], *, arrived_at: float, is_background: bool = False
    ) -> None:
        """`prompt_tokens` lists the prompt length of each of the call's requests."""
        self._model = model
        self._clock = model.clock
        self._arrived_at = arrived_at
        self._class = _BACKGROUND if is_background else _FOREGROUND
        latencies = model.latencies["", self._class]
        self._requests = [_RequestTimes(num_tokens, latencies) for num_tokens in prompt_tokens]
        self._num_open = len(self._requests)
        self._first_at: float | None = None  # time of the call's first token
        self._ended_at: float | None = None  # time at which the last request finished

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the call's arrival to its first token; None before the first token."""
        return None if self._first_at is None else self._first_at - self._arrived_at

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the end of the last request; None before that end or without any token."""
        return None if self._first_at is None or self._ended_at is None else self._ended_at - self._first_at

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call's arrival."""
        return self._clock() - self._arrived_at

    def __enter__(self) -> CallMetrics:
        self._model.num_in_flight += len(self._requests)
        return self

    def placed(self, index: int, group: str) -> None:
        """Count a request for its replica's group. Does nothing after the request's first token or without a group."""
        if group and not self._requests[index].num_tokens:
            self._requests[index].latencies = self._model.latencies[group, self._class]

    def left_queue(self, index: int, queue_s: float) -> None:
        """Record how long a request waited in its replica's queue. Does nothing after the request's first token."""
        request = self._requests[index]
        if not request.num_tokens:
            request.latencies.queue_s.observe(queue_s)

    def tokens(self, index: int, num_tokens: int) -> None:
        """Count one or more new tokens of a request."""
        now = self._clock()
        request = self._requests[index]
        self._model.num_generated_tokens += num_tokens
        if request.num_tokens:
            request.latencies.inter_token_s.observe((now - request.last_at) / num_tokens, num_tokens)
        else:
            self._first_tokens(request, now)
        request.num_tokens += num_tokens
        request.last_at = now

    def _first_tokens(self, request: _RequestTimes, now: float) -> None:
        request.first_at = now
        if self._first_at is None:
            self._first_at = now
        request.latencies.first_token_s.observe(now - self._arrived_at)
        self._model.histograms["prompt_tokens"].observe(request.num_prompt_tokens)

    def finished(self, index: int, reason: str) -> None:
        """Record a request's regular end. Aborted and failed requests are counted on exit."""
        now = self._clock()
        request, histograms = self._requests[index], self._model.histograms
        self._end(request, reason)
        self._num_open -= 1
        self._ended_at = None if self._num_open else now
        request.latencies.request_s.observe(now - self._arrived_at)
        histograms["generated_tokens"].observe(request.num_tokens)
        if request.num_tokens:
            histograms["decode_s"].observe(now - request.first_at)
        else:  # only the prompt was computed
            histograms["prompt_tokens"].observe(request.num_prompt_tokens)
        if request.num_tokens > 1:
            histograms["token_s"].observe((request.last_at - request.first_at) / (request.num_tokens - 1))

    def _end(self, request: _RequestTimes, reason: str) -> None:
        request.has_ended = True
        self._model.finished[reason] += 1
        self._model.num_in_flight -= 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        open_requests = [request for request in self._requests if not request.has_ended]
        if not isinstance(error, Exception):
            self._left(open_requests, FinishReason.ABORT)
        elif any(request.num_tokens for request in self._requests):
            self._model.failed(error)
            self._left(open_requests, FinishReason.ERROR)
        else:
            self._model.refused(error, is_background=self._class == _BACKGROUND)
            self._model.num_in_flight -= len(open_requests)

    def _left(self, open_requests: Sequence[_RequestTimes], reason: FinishReason) -> None:
        for request in open_requests:
            self._end(request, reason.value)
        histograms = self._model.histograms
        histograms["num_choices"].observe(len(self._requests))
        if not open_requests:
            histograms["longest_choice_tokens"].observe(max(request.num_tokens for request in self._requests))


class _LatencyHistograms:
    __slots__ = ("first_token_s", "inter_token_s", "queue_s", "request_s")

    def __init__(self) -> None:
        self.queue_s, self.first_token_s = Histogram(SECONDS), Histogram(SECONDS)
        self.inter_token_s, self.request_s = Histogram(SECONDS), Histogram(SECONDS)

    def snapshot(self) -> Latencies:
        return Latencies(**{name: getattr(self, name).snapshot() for name in self.__slots__})


@dataclass(slots=True)
class _RequestTimes:
    num_prompt_tokens: int
    latencies: _LatencyHistograms
    num_tokens: int = 0
    first_at: float = 0.0  # time of the first token
    last_at: float = 0.0  # time of the last token
    has_ended: bool = False


def reason_of(error: Exception) -> str:
    """Return a label value for an error: the class name of a `CarouselError` in snake case, otherwise `internal`."""
    if not isinstance(error, CarouselError):
        return _INTERNAL
    return _name_of(type(error))


def _name_of(kind: type[CarouselError]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _with_subclasses(kind: type[CarouselError]) -> list[type[CarouselError]]:
    return [kind, *(below for each in kind.__subclasses__() for below in _with_subclasses(each))]


_INTERNAL = "internal"
# Reasons for overload and failures of the service. The reasons for callers' mistakes appear with the first such error.
_SERVICE_REASONS = (NO_IDLE_SLOT, *map(_name_of, _with_subclasses(Overloaded) + _with_subclasses(Failure)), _INTERNAL)
