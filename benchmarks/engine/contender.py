"""Whoever can serve a workload, and how it is measured: a warm-up, then every repeat from the same state."""

from __future__ import annotations

from typing import Protocol

from benchmarks.engine.run import Run
from benchmarks.harness.command import BenchmarkError, tell
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
