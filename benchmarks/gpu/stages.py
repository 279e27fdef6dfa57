"""The stages of a run, in their order. The module of a stage has `measure(bench)`, which puts figures on the bench."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """One stage. Times in seconds, for a GPU of a data centre."""

    name: str
    module: str
    expected_s: int
    measures: str

    @property
    def deadline_s(self) -> int:
        """After so long it is stopped: what a first run compiles may take as long again."""
        return 2 * self.expected_s + 30


STAGES = (
    Stage("rates", "benchmarks.gpu.rates", 20, "versions, the card, rates of copies and of matrix products"),
    Stage("decode", "benchmarks.gpu.decode", 70, "decode steps by replay against bytes / rate of copies"),
    Stage("engine", "benchmarks.gpu.engine", 110, "the whole engine on requests of ragged lengths"),
)
