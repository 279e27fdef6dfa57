"""What one ingress measures of the requests that pass through it. No labels are looked up per token.

Each ingress process has its own `RequestMetrics`. Snapshots of several add up to the service as its callers see it.
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

NO_IDLE_SLOT = "no_idle_slot"  # why a background call is refused, a line of a batch for instance, until one is free
NO_MODEL = ""  # under which calls are counted that were refused before it was clear which model they meant
BOUNDS = {
    "token_s": SECONDS,
    "decode_s": SECONDS,
    "prompt_tokens": TOKENS,
    "generated_tokens": TOKENS,
    "longest_choice_tokens": TOKENS,
    "num_choices": SMALL_NUMBERS,
    "deltas_per_frame": SMALL_NUMBERS,
}


# What happened to the replica of a request that goes on at another (`ReplicaLost` of app/fleet).
LOSSES = ("broken", "ended", "engine_failed", "gap", "silent", "stuck")
_FOREGROUND, _BACKGROUND = "foreground", "background"
Kind = tuple[str, str]  # of a request: the group of its replica, and one of these two


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """The times of the requests of one kind."""

    queue_s: Distribution  # from the arrival at the replica to the first step, as the replica measured it
    first_token_s: Distribution  # from the arrival of the call to a request's first token
    inter_token_s: Distribution  # between two tokens of a request
    request_s: Distribution  # from the arrival of the call to the end of a request that finished

    def __add__(self, other: Latencies) -> Latencies:
        """Both together."""
        names = [field.name for field in fields(self)]
        return Latencies(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """The requests of one model since the ingress started. A call with `n` choices is `n` requests here."""

    num_in_flight: int
    num_generated_tokens: int
    finished: Mapping[str, int]  # requests by finish reason, aborted and failed ones too
    refused: Mapping[str, int]  # calls that ended with an error before their first token, by what it was
    failed: Mapping[str, int]  # calls that ended with one after it
    dispatched: Mapping[str, int]  # decisions where to send a request, by what decided them
    resumed: Mapping[str, int]  # requests that went on at another replica, by why they had to
    latencies: Mapping[Kind, Latencies]
    token_s: Distribution  # a request's mean time for a token after its first
    decode_s: Distribution  # from its first token to its end
    prompt_tokens: Distribution  # of requests that got a token, or ended without wanting one
    generated_tokens: Distribution  # of requests that finished
    longest_choice_tokens: Distribution  # of calls that finished
    num_choices: Distribution  # of all calls that were not refused
    deltas_per_frame: Distribution  # requests that got tokens by one frame from a replica

    def __add__(self, other: ModelSnapshot) -> ModelSnapshot:
        """Both together."""
        names = [field.name for field in fields(self)]
        return ModelSnapshot(**{name: _sum(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def first_token_s(self) -> Distribution:
        """Of all kinds, as the next two."""
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
    """How much an ingress has counted, which only ever grows: of two of its snapshots the later has more."""
    return sum(
        each.num_generated_tokens
        + sum(sum(counts.values()) for counts in (each.finished, each.refused, each.failed, each.dispatched))
        for each in snapshot.values()
    )


def without_requests(snapshot: Snapshot) -> Snapshot:
    """What an ingress that is gone has counted: it answers nothing any more."""
    return {name: replace(each, num_in_flight=0) for name, each in snapshot.items()}


def merge(snapshots: Iterable[Snapshot]) -> dict[str, ModelSnapshot]:
    """What several ingresses have measured, as if it had been one."""
    merged: dict[str, ModelSnapshot] = {}
    for snapshot in snapshots:
        for name, model in snapshot.items():
            merged[name] = merged[name] + model if name in merged else model
    return merged


class RequestMetrics:
    """What this process measures, model by model. For one event loop."""

    def __init__(self, model_names: Iterable[str] = (), *, clock: Clock = time.perf_counter) -> None:
        """A model that is named here has its zeros from the start; others come up with their first request."""
        self.clock = clock  # also of the arrivals that `CallMetrics` is given
        self._models: dict[str, ModelMetrics] = {}
        for name in model_names:
            self.model(name)

    def model(self, name: str) -> ModelMetrics:
        """The metrics of one model."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self.clock)
        return self._models[name]

    def snapshot(self) -> dict[str, ModelSnapshot]:
        """All of it, frozen, by model; it can be sent to another process and merged with those of others."""
        return {name: model.snapshot() for name, model in self._models.items()}


class ModelMetrics:
    """The requests of one model."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_in_flight = 0
        self.num_generated_tokens = 0
        self.finished = Counter({reason.value: 0 for reason in FinishReason})
        self.latencies = defaultdict[Kind, _LatencyHistograms](_LatencyHistograms)
        _ = self.latencies["", _FOREGROUND]  # has its zeros from the start
        self.histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        # What alerts ask for is 0 from the start: Prometheus sees no rise in a counter that begins with 1.
        self._refused = Counter(dict.fromkeys(_SERVICE_REASONS, 0))
        self._failed = Counter(dict.fromkeys(_SERVICE_REASONS, 0))
        self._dispatched: Counter[str] = Counter()
        self._resumed = Counter(dict.fromkeys(LOSSES, 0))

    def refused(self, error: Exception, *, is_background: bool = False) -> None:
        """A call was answered with an error before anything else. A background call only asks for an idle slot."""
        finds_no_slot = is_background and isinstance(error, Overloaded)
        self._refused[NO_IDLE_SLOT if finds_no_slot else reason_of(error)] += 1

    def failed(self, error: Exception) -> None:
        """A call ended with an error after it had begun to be answered."""
        self._failed[reason_of(error)] += 1

    def dispatched(self, reason: str) -> None:
        """A request was sent to a replica; `reason` is one of a few words for what decided which."""
        self._dispatched[reason] += 1

    def resumed(self, reason: str) -> None:
        """A request goes on at another replica; `reason` is one of a few words for what happened to the one before."""
        self._resumed[reason] += 1

    def frame_received(self, num_deltas: int) -> None:
        """A replica has sent a frame with tokens for so many requests."""
        self.histograms["deltas_per_frame"].observe(num_deltas)

    def snapshot(self) -> ModelSnapshot:
        """All of it, frozen."""
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
    """One call on its way: `with` it around the answering, tell it of tokens and ends as they come.

    Requests that have no end when it is left have failed, if an error leaves with it, or else were aborted.
    """

    __slots__ = (
        "_arrived_at", "_class", "_clock", "_ended_at", "_first_at", "_model", "_num_open", "_requests",
    )  # fmt: skip

    def __init__(
        self, model: ModelMetrics, prompt_tokens: Sequence[int], *, arrived_at: float, is_background: bool = False
    ) -> None:
        """`prompt_tokens` has the length of the prompt of each of its requests."""
        self._model = model
        self._clock = model.clock
        self._arrived_at = arrived_at
        self._class = _BACKGROUND if is_background else _FOREGROUND
        latencies = model.latencies["", self._class]
        self._requests = [_RequestTimes(num_tokens, latencies) for num_tokens in prompt_tokens]
        self._num_open = len(self._requests)
        self._first_at: float | None = None  # when the first of them got a token
        self._ended_at: float | None = None  # when the last of them finished

    @property
    def first_token_s(self) -> float | None:
        """From the call's arrival to the first token of all; None before."""
        return None if self._first_at is None else self._first_at - self._arrived_at

    @property
    def decode_s(self) -> float | None:
        """From there to the end of the last request; None before, and without any token."""
        return None if self._first_at is None or self._ended_at is None else self._ended_at - self._first_at

    @property
    def elapsed_s(self) -> float:
        """From the call's arrival until now."""
        return self._clock() - self._arrived_at

    def __enter__(self) -> CallMetrics:
        self._model.num_in_flight += len(self._requests)
        return self

    def placed(self, index: int, group: str) -> None:
        """A replica of this group has one of the requests, which counts for the group from now on."""
        if group and not self._requests[index].num_tokens:
            self._requests[index].latencies = self._model.latencies[group, self._class]

    def left_queue(self, index: int, queue_s: float) -> None:
        """A replica says how long one of the requests waited; only the first counts."""
        request = self._requests[index]
        if not request.num_tokens:
            request.latencies.queue_s.observe(queue_s)

    def tokens(self, index: int, num_tokens: int) -> None:
        """One of the requests has got so many tokens more, at least one."""
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
        """One of the requests has come to its end by itself."""
        now = self._clock()
        request, histograms = self._requests[index], self._model.histograms
        self._end(request, reason)
        self._num_open -= 1
        self._ended_at = None if self._num_open else now
        request.latencies.request_s.observe(now - self._arrived_at)
        histograms["generated_tokens"].observe(request.num_tokens)
        if request.num_tokens:
            histograms["decode_s"].observe(now - request.first_at)
        else:  # it only had its prompt computed
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
    """Of one kind of requests."""

    __slots__ = ("first_token_s", "inter_token_s", "queue_s", "request_s")

    def __init__(self) -> None:
        self.queue_s, self.first_token_s = Histogram(SECONDS), Histogram(SECONDS)
        self.inter_token_s, self.request_s = Histogram(SECONDS), Histogram(SECONDS)

    def snapshot(self) -> Latencies:
        return Latencies(**{name: getattr(self, name).snapshot() for name in self.__slots__})


@dataclass(slots=True)
class _RequestTimes:
    """What is known of one request of a call."""

    num_prompt_tokens: int
    latencies: _LatencyHistograms
    num_tokens: int = 0
    first_at: float = 0.0  # this and the next: when it got a token
    last_at: float = 0.0
    has_ended: bool = False


def reason_of(error: Exception) -> str:
    """An error as the value of a label: the name of its class for what is in our tree, `internal` for all else."""
    if not isinstance(error, CarouselError):
        return _INTERNAL
    return _name_of(type(error))


def _name_of(kind: type[CarouselError]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _with_subclasses(kind: type[CarouselError]) -> list[type[CarouselError]]:
    return [kind, *(below for each in kind.__subclasses__() for below in _with_subclasses(each))]


_INTERNAL = "internal"
# Overload and our failures; a caller's mistakes come up with the first.
_SERVICE_REASONS = (NO_IDLE_SLOT, *map(_name_of, _with_subclasses(Overloaded) + _with_subclasses(Failure)), _INTERNAL)
