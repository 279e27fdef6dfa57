"""An engine that serves a workload, and how it is measured: a warm-up, then every repeat from the same state."""

from __future__ import annotations

from typing import Protocol

from benchmarks.engine.run import Run
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.machine import seconds_since_start
from benchmarks.harness.workload import Workload


class Contender(Protocol):
    """Serves whole workloads, one after the other."""

    def serve(self, workload: Workload) -> Run: ...

    def forget(self) -> None:
        """Drop what would make the next run of the same requests cheaper."""
        ...


def measured_runs(contender: Contender, workload: Workload, *, repeat: int) -> list[Run]:
    """Warm up, then serve the workload `repeat` times; one line of progress on stderr for each.

    Raises:
        BenchmarkError: a request ended without a token.
    """
    tell(f"warm-up: {_in_words(contender.serve(workload.warm_up()))}")
    runs: list[Run] = []
    for number in range(1, repeat + 1):
        contender.forget()
        run = contender.serve(workload)
        silent = next((name for name, timeline in run.timelines.items() if not timeline.token_ids), None)
        if silent is not None:
            raise BenchmarkError(f"request {silent!r} ended without a token")
        tell(f"repeat {number} of {repeat}: {_in_words(run)}")
        runs.append(run)
    return runs


def _in_words(run: Run) -> str:
    tokens = run.num_output_tokens
    return f"{tokens:,} output tokens in {run.seconds:.2f} s, {tokens / run.seconds:,.0f} tokens/s"


class FirstTokenWatch:
    """A contender that notes when its first run, the warm-up, delivered its first token."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._has_served = False
        self.start_to_first_token_s: float | None = None

    def serve(self, workload: Workload) -> Run:
        age_s = None if self._has_served else seconds_since_start()
        run = self._contender.serve(workload)
        if age_s is not None:
            first_s = min(timeline.delivered_s[0] for timeline in run.timelines.values() if timeline.delivered_s)
            self.start_to_first_token_s = age_s + first_s
        self._has_served = True
        return run

    def forget(self) -> None:
        self._contender.forget()
