"""What most people have today: transformers' `generate` on padded batches, made up in three ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from benchmarks.engine.run import Clock, MonotonicClock, Run, Timeline
from benchmarks.harness.workload import TimedRequest, Workload
from benchmarks.peers.hf_static import StaticBatches

Grouping = Literal["static", "dynamic", "sorted"]
GROUPINGS: tuple[Grouping, ...] = ("static", "dynamic", "sorted")


class PaddedBatches(StaticBatches):
    """Batches of at most `batch_size` that run until their longest request is done.

    static: full batches in order of arrival. dynamic: the waiting requests once the batch is full or the oldest
    has waited `window_s`. sorted: as dynamic, but the oldest and those closest to it in prompt length.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int,
        window_s: float,
        start_clock: Callable[[], Clock] = MonotonicClock,
    ) -> None:
        super().__init__(model, batch_size=batch_size, start_clock=start_clock)
        self.grouping: Grouping = "static"
        self._window_s = window_s
        self.joined_s: dict[str, float] = {}  # when each request's batch began, seconds after the start
        self._num_computed = 0
        self._num_own = 0

    @property
    def padding_share(self) -> float:
        """Tokens that were computed for no request, of all: padding on the left, and rows that had ended."""
        return 1 - self._num_own / self._num_computed if self._num_computed else 0.0

    def serve(self, workload: Workload) -> Run:
        self.joined_s, self._num_computed, self._num_own = {}, 0, 0
        timelines = {timed.request.request_id: Timeline(timed.arrival_s) for timed in workload.requests}
        arriving, waiting = deque(workload.requests), list[TimedRequest]()
        clock = self._start_clock()
        while arriving or waiting:
            now_s = clock.now()
            while arriving and arriving[0].arrival_s <= now_s:
                waiting.append(arriving.popleft())
            due_s = self._due_s(waiting, arriving, now_s)
            if due_s > now_s:
                clock.wait_until(due_s)
                continue
            batch = take_batch(waiting, self._batch_size, by_length=self.grouping == "sorted")
            self.joined_s |= {timed.request.request_id: now_s for timed in batch}
            rows = self._generate(batch)
            self._count(batch, rows)
            at_s = clock.now()
            for timed, row in zip(batch, rows, strict=True):
                timelines[timed.request.request_id].deliver(row, at_s=at_s)
        return Run(seconds=clock.now(), timelines=timelines, streams=False)

    def _due_s(self, waiting: Sequence[TimedRequest], arriving: Sequence[TimedRequest], now_s: float) -> float:
        """When the next batch goes, or when to look again."""
        if len(waiting) >= self._batch_size or (self.grouping == "static" and not arriving):
            return now_s
        times = [arriving[0].arrival_s] if arriving else []
        if waiting and self.grouping != "static":
            times.append(waiting[0].arrival_s + self._window_s)
        return min(times)

    def _count(self, batch: Sequence[TimedRequest], rows: Sequence[Sequence[int]]) -> None:
        """`generate` computes every row as far as the longest prompt and output; the last token is only drawn."""
        width = max(timed.num_prompt_tokens for timed in batch)
        self._num_computed += len(batch) * (width + max(len(row) for row in rows) - 1)
        self._num_own += sum(timed.num_prompt_tokens + len(row) - 1 for timed, row in zip(batch, rows, strict=True))


def take_batch(waiting: list[TimedRequest], size: int, *, by_length: bool) -> list[TimedRequest]:
    """Take a batch out of the waiting requests, the oldest among them, so that none waits for ever."""
    oldest = waiting[0]
    order = list(waiting)
    if by_length:
        order.sort(key=lambda timed: abs(timed.num_prompt_tokens - oldest.num_prompt_tokens))
    batch = order[:size]
    taken = {timed.request.request_id for timed in batch}
    waiting[:] = [timed for timed in waiting if timed.request.request_id not in taken]
    return batch
