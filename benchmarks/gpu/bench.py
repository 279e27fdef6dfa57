"""The tools of a stage: the device, sizes for the device, a clock, and a file that stores figures as they are found."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.harness.command import tell

Size = TypeVar("Size")
Item = TypeVar("Item")

BLOCK_SIZE = 16  # of the KV memory of every stage

_NUM_WARM_UPS = 3  # kernels are compiled, memory is allocated, clocks rise


class Bench:
    """One stage's run, on a GPU or as a stand-in on a CPU with sizes that say nothing about speed."""

    def __init__(
        self, *, out: Path, file: Path, stands_in: bool, earlier: Mapping[str, Mapping[str, Any]], stage: str = ""
    ) -> None:
        """Store figures in `file`, and resume an interrupted run of the stage from it.

        out: folder for the files of stages. earlier: figures of other stages, by the names of the stages.
        """
        self.stage = stage
        self.out = out
        self.stands_in = stands_in
        self.device = torch.device("cpu" if stands_in else "cuda")
        self.earlier = earlier
        self._file = file
        self._kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self._done: dict[str, None] = dict.fromkeys(self._kept.get("done", ()))
        self._num_whole: dict[str, int] = self._kept.get("num_whole", {})  # rows of finished parts, by table
        self.figures: dict[str, Any] = self._kept.get("figures", {})
        self.tables: dict[str, list[dict[str, Any]]] = {
            name: rows[: self._num_whole[name]]
            for name, rows in self._kept.get("tables", {}).items() if name in self._num_whole
        }  # fmt: skip

    def sized(self, on_gpu: Size, standing_in: Size) -> Size:
        """Return the size for this run: on a GPU, or standing in."""
        return standing_in if self.stands_in else on_gpu

    def put(self, **figures: Any) -> None:
        """Store figures by name at once, so that they remain if the stage fails. A unit ends the name."""
        self.figures |= figures
        tell(", ".join(f"{name} {value}" for name, value in figures.items()))
        self._write()

    def row(self, table: str, **cells: Any) -> None:
        """Store a row of a table; all rows of a table have the same cells."""
        self.tables.setdefault(table, []).append(cells)
        tell(f"{table}: {cells}")
        self._write()

    def parts(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items that an earlier, stopped process of this stage has not finished.

        A stage with parts must make all its rows within them.
        """
        for item in items:
            part = f"{name} {item}"
            if part in self._done:
                tell(f"{part}: measured already")
                continue
            yield item
            self._done[part] = None
            self._num_whole = {table: len(rows) for table, rows in self.tables.items()}
            self._write()

    def skip(self, reason: str) -> None:
        """Skip the whole stage: a requirement is missing here."""
        self.put(skipped=reason)

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], object], *, repeat: int = 20) -> float:
        """Return the median time of one call, on the device's clock."""
        for _ in range(self.sized(_NUM_WARM_UPS, 1)):
            function()
        repeat = self.sized(repeat, 2)
        if self.device.type != "cuda":
            return statistics.median(host_seconds(function) for _ in range(repeat))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]  # type: ignore[no-untyped-call]
        for began, ended in events:
            began.record()
            function()
            ended.record()
        torch.cuda.synchronize()
        return statistics.median(float(began.elapsed_time(ended)) for began, ended in events) / 1e3

    def seconds_in_a_row(self, function: Callable[[], object], *, repeat: int = 20) -> float:
        """Return the time of one call among many that follow one another without waiting, by the host's clock."""
        for _ in range(self.sized(_NUM_WARM_UPS, 1)):
            function()
        self.synchronize()
        repeat = self.sized(repeat, 2)
        began_at = time.perf_counter()
        for _ in range(repeat):
            function()
        self.synchronize()
        return (time.perf_counter() - began_at) / repeat

    def of_earlier(self, stage: str, figure: str) -> float | None:
        """Return a figure of an earlier stage, or None if that stage has not run."""
        value = self.earlier.get(stage, {}).get(figure)
        return float(value) if isinstance(value, int | float) else None

    def _write(self) -> None:
        own = {"figures": self.figures, "tables": self.tables, "done": list(self._done), "num_whole": self._num_whole}
        text = json.dumps(self._kept | own)
        part = self._file.with_suffix(".part")  # a stage that is stopped during the write leaves the file whole
        part.write_text(text, encoding="utf-8")
        part.replace(self._file)


def host_seconds(function: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    function()
    return time.perf_counter() - began_at
