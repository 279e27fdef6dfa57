"""What other processes report for /metrics. The counts of a process stay when it stops, so that no sum falls.

A replica writes the samples of its own series itself, and sends their text. An ingress that wrote the samples of a
thousand replicas would need more than a second of CPU for each scrape.
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

MAX_REPORT_BYTES = 256 * 1024  # a usual report has 20 KiB
GONE_S = 600.0  # after which the counts of a process that is gone are only kept in a sum
MAX_GONE = 1000  # processes that are gone and whose counts are kept one by one, however short that is ago
MAX_FOLDED_IDS = 1000  # of the last processes in the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one replica measures of its engine."""

    replica_id: str
    stats: EngineStats
    measurements: EngineMeasurements
    group: str = ""  # of an A/B trial that the replica belongs to
    loop: LoopSnapshot | None = None  # the replica's, beside the engine's thread


class EngineCounts(msgspec.Struct, frozen=True, array_like=True):
    """What one engine has counted since its start and an ingress adds up; or the sum of several."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    step_tokens: Distribution = Distribution.empty(TOKENS)
    queue_s: Distribution = Distribution.empty(SECONDS)
    prefill_s: Distribution = Distribution.empty(SECONDS)

    @property
    def num_counted(self) -> int:
        """How much there is: of two reports of one engine the later has more, unless both are the same."""
        numbers = self.num_steps + self.num_preemptions + self.num_prompt_tokens + self.num_cached_tokens
        return numbers + sum(each.num_values for each in (self.step_tokens, self.queue_s, self.prefill_s))


class EngineGauges(msgspec.Struct, frozen=True, array_like=True):
    """What an ingress adds up or compares of the engines that are there now."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int  # tokens
    max_adapters: int = 0  # LoRA adapters that it may have loaded
    adapters: tuple[str, ...] = ()  # names of those that are loaded
    waiting_adapters: tuple[str, ...] = ()  # of those that requests wait for


class ReplicaMetrics(msgspec.Struct, frozen=True, array_like=True):
    """What one replica sends for a scrape. Neighbouring versions understand each other as those of frames do."""

    lines: dict[str, bytes]  # its samples as Prometheus text, by the name of the family
    counts: EngineCounts
    gauges: EngineGauges
    use: dict[str, float]  # what a policy of autoscaling is told


class InvalidReport(ValueError):
    """Bytes that are no `ReplicaMetrics`, or too many."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplicaMetrics).decode


def encoded(metrics: ReplicaMetrics) -> bytes:
    """As it is sent."""
    return _encode(metrics)


def decoded(data: bytes) -> ReplicaMetrics:
    """What a replica has sent. Raises InvalidReport for what would spoil the text or the sums of all replicas."""
    if len(data) > MAX_REPORT_BYTES:
        raise InvalidReport(f"it has {len(data):,} bytes; at most {MAX_REPORT_BYTES:,} are read")
    try:
        metrics = _decode(data)
    except msgspec.DecodeError as error:
        raise InvalidReport(str(error)) from error
    for name, lines in metrics.lines.items():
        start = name.encode()
        if not (lines.startswith(start) and lines.endswith(b"\n") and _num_lines(lines, start) == lines.count(b"\n")):
            raise InvalidReport(f"lines of {name[:100]!r} are no samples of it")
    if not all(map(isfinite, metrics.use.values())):
        raise InvalidReport("its use has a value that is no number")
    counts = metrics.counts
    if min(counts.num_steps, counts.num_preemptions, counts.num_prompt_tokens, counts.num_cached_tokens) < 0:
        raise InvalidReport("a count is below 0")
    known = {name: _with_known_bounds(getattr(counts, name), bounds) for name, bounds in _BOUNDS.items()}
    return msgspec.structs.replace(metrics, counts=msgspec.structs.replace(counts, **known))


_BOUNDS = {"step_tokens": TOKENS, "queue_s": SECONDS, "prefill_s": SECONDS}


def _num_lines(lines: bytes, start: bytes) -> int:
    """Lines that begin so; the first does."""
    return 1 + lines.count(b"\n" + start)


def _with_known_bounds(spread: Distribution, bounds: tuple[float, ...]) -> Distribution:
    """The same, with the one tuple of bounds that all share."""
    if spread.bounds != bounds or len(spread.counts) != len(bounds) + 1:
        raise InvalidReport(f"a histogram has {len(spread.bounds)} bounds that are others than here")
    if min(spread.counts) < 0 or not 0 <= spread.total < inf:
        raise InvalidReport("a histogram has values that no counter can have")
    return replace(spread, bounds=bounds)


def counts_of(report: EngineReport) -> EngineCounts:
    """The part of a report that is added up for ever."""
    stats, measurements = report.stats, report.measurements
    return EngineCounts(
        stats.total_steps, stats.total_preemptions, stats.total_prompt_tokens, stats.total_cached_tokens,
        measurements.step_tokens, measurements.queue_s, measurements.prefill_s,
    )  # fmt: skip


def gauges_of(report: EngineReport) -> EngineGauges:
    """The part of a report that is of this moment."""
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
    """What several engines have counted, as if it had been one."""
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
    """The sum of the counts of processes that have been gone for long."""

    number: int = 0  # of processes
    ids: tuple[str, ...] = ()  # of the last of them
    counts: CountsT | None = None  # None: of no process

    @property
    def rank(self) -> tuple[int, tuple[str, ...]]:
        """Of two sums the one with the higher rank holds."""
        return self.number, self.ids[-1:]


@dataclass(frozen=True, slots=True)
class Known(Generic[CountsT]):
    """What one instance of `ProcessCounts` knows, in short, for another to tell it the rest."""

    num_counted: Mapping[str, int]  # how much each process has counted, by its id
    folded: Folded[CountsT]


@dataclass(frozen=True, slots=True)
class Later(Generic[CountsT]):
    """What another instance knows beyond that."""

    counts: Mapping[str, CountsT]  # of processes, by their ids
    folded: Folded[CountsT] | None  # None: its sum has no higher rank


class ProcessCounts(Generic[CountsT]):
    """What all processes of one kind have counted, those that are gone too. Instances tell each other what they know.

    The counts of a process that is gone stay apart for a while, so that each instance hears of it and keeps the latest
    of what any has heard. Then they are added to a sum. An instance takes over the whole sum of another that has more
    processes in it, and with it the ids of the last of them, which it does not count again.
    """

    def __init__(
        self,
        num_counted: Callable[[CountsT], int],
        total: Callable[[Iterable[CountsT]], CountsT],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """`num_counted` tells the later of two counts of one process: it only grows. `total` adds counts up."""
        self._num_counted = num_counted
        self._total = total
        self._clock = clock
        self._last: dict[str, CountsT] = {}
        self._gone_at: dict[str, float] = {}  # when a process was first missed
        self._folded: Folded[CountsT] = Folded()
        self._folded_ids: frozenset[str] = frozenset()

    def known(self) -> Known[CountsT]:
        """In short, for another instance."""
        return Known({name: self._num_counted(each) for name, each in self._last.items()}, self._folded)

    def beyond(self, known: Known[CountsT]) -> Later[CountsT]:
        """What the other instance lacks. This one takes over the other's sum if that has the higher rank."""
        self._take_over(known.folded)
        is_ahead = self._folded.rank > known.folded.rank
        # One that takes over a sum from here loses the processes of its own that are not in it.
        folded_there = () if is_ahead else known.folded.ids
        counts = {
            name: each
            for name, each in self._last.items()
            if self._num_counted(each) > known.num_counted.get(name, -1) and name not in folded_there
        }
        return Later(counts, self._folded if is_ahead else None)

    def learn(self, counts: Mapping[str, CountsT]) -> None:
        """Keep the later of two counts of the same process."""
        for name, each in counts.items():
            last = self._last.get(name)
            if name in self._folded_ids or (last is not None and self._num_counted(last) > self._num_counted(each)):
                continue
            self._last[name] = each

    def learn_later(self, later: Later[CountsT]) -> None:
        """What another instance has told."""
        if later.folded is not None:
            self._take_over(later.folded)
        self.learn(later.counts)

    def note_present(self, present: Collection[str]) -> None:
        """These are there. Add up what those have counted that have been gone for long."""
        now = self._clock()
        self._gone_at = {name: self._gone_at.get(name, now) for name in self._last if name not in present}
        by_age = sorted(self._gone_at, key=self._gone_at.__getitem__)
        num_surplus = len(by_age) - MAX_GONE
        old = [name for at, name in enumerate(by_age) if at < num_surplus or self._gone_at[name] <= now - GONE_S]
        if old:
            self._fold(old)

    def without(self, ids: Collection[str] = ()) -> list[CountsT]:
        """The counts of all processes but these, as items that add up."""
        others = [each for name, each in self._last.items() if name not in ids]
        return others if self._folded.counts is None else [self._folded.counts, *others]

    def of(self, ids: Iterable[str]) -> list[CountsT]:
        """The counts of these, except those that `without` has in its sum."""
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

    def _take_over(self, folded: Folded[CountsT]) -> None:
        if folded.rank > self._folded.rank:
            self._set_folded(folded)
            for name in self._folded_ids & self._last.keys():
                del self._last[name]

    def _set_folded(self, folded: Folded[CountsT]) -> None:
        self._folded, self._folded_ids = folded, frozenset(folded.ids)
