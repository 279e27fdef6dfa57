"""Reports from other processes for /metrics. Stopped processes still count, so that sums never decrease.

Each replica writes its own samples and sends them as text, because an ingress that wrote the samples of a thousand
replicas would need more than a second of CPU for each scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Generic, TypeVar

import msgspec

from app.engine.histogram import SECONDS, TOKENS, Distribution, sum_distributions
from app.engine.stats import EngineMeasurements, EngineStats
from app.metrics.event_loop import LoopSnapshot

CountsT = TypeVar("CountsT")
Clock = Callable[[], float]

MAX_REPORT_BYTES = 256 * 1024  # a usual report needs 20 KiB
GONE_S = 600.0  # time after which a stopped process's counts are stored only in a sum
MAX_GONE = 1000  # maximum number of stopped processes with separate counts, even if all stopped recently
MAX_FOLDED_IDS = 1000  # number of ids to remember of processes in the sum, those that were added last


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The measurements of one replica's engine."""

    replica_id: str
    stats: EngineStats
    measurements: EngineMeasurements
    group: str = ""  # the replica's group of an A/B trial
    loop: LoopSnapshot | None = None  # of the replica's event loop, which runs alongside the engine's thread


class EngineCounts(msgspec.Struct, frozen=True, array_like=True):
    """One engine's counts since its start, which an ingress adds up, or the sum over several engines."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    step_tokens: Distribution = Distribution.empty(TOKENS)
    queue_s: Distribution = Distribution.empty(SECONDS)
    prefill_s: Distribution = Distribution.empty(SECONDS)

    @property
    def num_counted(self) -> int:
        """A sum that never decreases, which shows which of an engine's reports is newer."""
        numbers = self.num_steps + self.num_preemptions + self.num_prompt_tokens + self.num_cached_tokens
        return numbers + sum(each.num_values for each in (self.step_tokens, self.queue_s, self.prefill_s))


class EngineGauges(msgspec.Struct, frozen=True, array_like=True):
    """Current values of one engine that an ingress adds up or compares."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int  # tokens
    max_adapters: int = 0  # LoRA adapters that may be loaded at once
    adapters: tuple[str, ...] = ()  # names of the loaded adapters
    waiting_adapters: tuple[str, ...] = ()  # names of the adapters that requests wait for


class ReplicaMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The metrics that one replica sends for a scrape. Its fields are encoded by position, as in a `Frame`."""

    lines: dict[str, bytes]  # the replica's samples as Prometheus text, by the name of the family
    counts: EngineCounts
    gauges: EngineGauges
    use: dict[str, float]  # values for an autoscaling policy


class InvalidReport(ValueError):
    """Raised for bytes that are not a `ReplicaMetrics`, or that are too long."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplicaMetrics).decode


def encoded(metrics: ReplicaMetrics) -> bytes:
    """Return a replica's metrics as bytes for `decoded`."""
    return _encode(metrics)


def decoded(data: bytes) -> ReplicaMetrics:
    """Return a replica's metrics. Raises InvalidReport for metrics that would corrupt the text or the sums."""
    if len(data) > MAX_REPORT_BYTES:
        raise InvalidReport(f"the report has {len(data):,} bytes; at most {MAX_REPORT_BYTES:,} are accepted")
    try:
        metrics = _decode(data)
    except msgspec.DecodeError as error:
        raise InvalidReport(str(error)) from error
    for name, lines in metrics.lines.items():
        start = name.encode()
        if not (lines.startswith(start) and lines.endswith(b"\n") and _num_lines(lines, start) == lines.count(b"\n")):
            raise InvalidReport(f"lines of {name[:100]!r} are not samples of this family")
    if not all(map(isfinite, metrics.use.values())):
        raise InvalidReport("`use` has a value that is not a finite number")
    counts = metrics.counts
    if min(counts.num_steps, counts.num_preemptions, counts.num_prompt_tokens, counts.num_cached_tokens) < 0:
        raise InvalidReport("a count is negative")
    known = {name: _with_known_bounds(getattr(counts, name), bounds) for name, bounds in _BOUNDS.items()}
    return msgspec.structs.replace(metrics, counts=msgspec.structs.replace(counts, **known))


_BOUNDS = {"step_tokens": TOKENS, "queue_s": SECONDS, "prefill_s": SECONDS}


def _num_lines(lines: bytes, start: bytes) -> int:
    """Return the number of lines that begin with `start`. The first line must be one of them."""
    return 1 + lines.count(b"\n" + start)


def _with_known_bounds(spread: Distribution, bounds: tuple[float, ...]) -> Distribution:
    """Return the distribution with the shared tuple of bounds. Raises InvalidReport for other bounds or bad values."""
    if spread.bounds != bounds or len(spread.counts) != len(bounds) + 1:
        raise InvalidReport(f"a histogram has {len(spread.bounds)} bounds that differ from the bounds in this version")
    if min(spread.counts) < 0 or not 0 <= spread.total < inf:
        raise InvalidReport("a histogram has a negative count, or a sum that is negative or not finite")
    return replace(spread, bounds=bounds)


def counts_of(report: EngineReport) -> EngineCounts:
    """Return a report's counts since the engine started."""
    stats, measurements = report.stats, report.measurements
    return EngineCounts(
        stats.total_steps, stats.total_preemptions, stats.total_prompt_tokens, stats.total_cached_tokens,
        measurements.step_tokens, measurements.queue_s, measurements.prefill_s,
    )  # fmt: skip


def gauges_of(report: EngineReport) -> EngineGauges:
    """Return a report's current values."""
    stats, adapters = report.stats, report.measurements.adapters
    gauges = EngineGauges(
        stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks, report.measurements.block_size
    )
    if not adapters:
        return gauges
    return msgspec.structs.replace(
        gauges, max_adapters=adapters.max_loaded, adapters=adapters.names, waiting_adapters=adapters.waiting_names
    )


def sum_counts(several: Iterable[EngineCounts]) -> EngineCounts:
    """Return the sum of several engines' counts; all zeros without any engine."""
    each = list(several)
    return EngineCounts(
        sum(one.num_steps for one in each),
        sum(one.num_preemptions for one in each),
        sum(one.num_prompt_tokens for one in each),
        sum(one.num_cached_tokens for one in each),
        **{name: sum_distributions([getattr(one, name) for one in each], bounds) for name, bounds in _BOUNDS.items()},
    )


@dataclass(frozen=True, slots=True)
class Folded(Generic[CountsT]):
    """The sum of the counts of processes that stopped long ago."""

    number: int = 0  # number of processes in the sum
    ids: tuple[str, ...] = ()  # ids of the processes that were added last
    counts: CountsT | None = None  # None before any process was added

    @property
    def rank(self) -> tuple[int, tuple[str, ...]]:
        """Sort key of sums. A sum with a higher rank replaces one with a lower rank."""
        return self.number, self.ids[-1:]


@dataclass(frozen=True, slots=True)
class Known(Generic[CountsT]):
    """A summary of one `ProcessCounts`, to which another instance responds with the missing counts (`Later`)."""

    num_counted: Mapping[str, int]  # how recent the known counts of each process are, by process id
    folded: Folded[CountsT]


@dataclass(frozen=True, slots=True)
class Later(Generic[CountsT]):
    """The counts that one instance of `ProcessCounts` has and another instance lacks."""

    counts: Mapping[str, CountsT]  # by process id
    folded: Folded[CountsT] | None  # None if the other instance's sum has the same or a higher rank


class ProcessCounts(Generic[CountsT]):
    """The counts of all processes of one kind, including stopped processes. Instances exchange their counts.

    The counts of a stopped process remain separate for a while, so that every instance can receive the latest ones.
    Then they are added to a sum. An instance replaces its sum with another instance's sum if that includes more
    processes, and remembers the ids of these processes to avoid counting them twice.
    """

    def __init__(
        self,
        num_counted: Callable[[CountsT], int],
        total: Callable[[Iterable[CountsT]], CountsT],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """`num_counted` returns a number that never decreases, to recognize newer counts. `total` adds up counts."""
        self._num_counted = num_counted
        self._total = total
        self._clock = clock
        self._last: dict[str, CountsT] = {}
        self._gone_at: dict[str, float] = {}  # when each stopped process was first missing
        self._folded: Folded[CountsT] = Folded()
        self._folded_ids: frozenset[str] = frozenset()

    def known(self) -> Known[CountsT]:
        """Return a summary of the counts, to be passed to another instance's `beyond`."""
        return Known({name: self._num_counted(each) for name, each in self._last.items()}, self._folded)

    def beyond(self, known: Known[CountsT]) -> Later[CountsT]:
        """Return the counts that another instance lacks. Adopts that instance's sum if it has a higher rank."""
        self._adopt(known.folded)
        is_ahead = self._folded.rank > known.folded.rank
        # An instance that adopts this sum drops its own, and then needs the counts that only its own sum included.
        folded_there = () if is_ahead else known.folded.ids
        counts = {
            name: each
            for name, each in self._last.items()
            if self._num_counted(each) > known.num_counted.get(name, -1) and name not in folded_there
        }
        return Later(counts, self._folded if is_ahead else None)

    def learn(self, counts: Mapping[str, CountsT]) -> None:
        """Record counts of processes, unless newer counts of the same process are known."""
        for name, each in counts.items():
            last = self._last.get(name)
            if name in self._folded_ids or (last is not None and self._num_counted(last) > self._num_counted(each)):
                continue
            self._last[name] = each

    def learn_later(self, later: Later[CountsT]) -> None:
        """Record another instance's answer to `known`."""
        if later.folded is not None:
            self._adopt(later.folded)
        self.learn(later.counts)

    def set_running(self, present: Collection[str]) -> None:
        """Record which processes are running, and add the counts of those that stopped long ago to the sum."""
        now = self._clock()
        self._gone_at = {name: self._gone_at.get(name, now) for name in self._last if name not in present}
        by_age = sorted(self._gone_at, key=self._gone_at.__getitem__)
        num_surplus = len(by_age) - MAX_GONE
        old = [name for at, name in enumerate(by_age) if at < num_surplus or self._gone_at[name] <= now - GONE_S]
        if old:
            self._fold(old)

    def without(self, ids: Collection[str] = ()) -> list[CountsT]:
        """Return counts that add up to the total of all processes except these."""
        others = [each for name, each in self._last.items() if name not in ids]
        return others if self._folded.counts is None else [self._folded.counts, *others]

    def of(self, ids: Iterable[str]) -> list[CountsT]:
        """Return the counts of these processes. Unknown processes, and those already in the sum, are left out."""
        return [self._last[name] for name in ids if name in self._last]

    def _fold(self, ids: list[str]) -> None:
        counts = [self._last.pop(name) for name in ids]
        for name in ids:
            del self._gone_at[name]
        before = self._folded
        self._set_folded(
            Folded(
                before.number + len(ids),
                (*before.ids, *ids)[-MAX_FOLDED_IDS:],
                self._total(counts if before.counts is None else [before.counts, *counts]),
            )
        )

    def _adopt(self, folded: Folded[CountsT]) -> None:
        if folded.rank > self._folded.rank:
            self._set_folded(folded)
            for name in self._folded_ids & self._last.keys():
                del self._last[name]

    def _set_folded(self, folded: Folded[CountsT]) -> None:
        self._folded, self._folded_ids = folded, frozenset(folded.ids)
