"""Run work of a stage in more processes, each with its own bench. The end of a process does not end the stage."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import standing_in


class Child(NamedTuple):
    """The result of one process."""

    figures: Mapping[str, Any]
    end: str  # how the process ended, in words


def in_processes(
    bench: Bench,
    work: Callable[..., None],
    arguments: Sequence[Sequence[Any]],
    *,
    deadline_s: float,
    takes_cpu_for_gpu: bool = True,
    verifies: bool = False,
) -> list[Child]:
    """Call `work(bench, *arguments)` for each of the arguments, all at once.

    deadline_s: for all processes together, with their starts; ten times as long for a stand-in. takes_cpu_for_gpu and
    verifies: see `standing_in`; takes_cpu_for_gpu must be False if the work computes in processes that it starts.
    """
    files = [bench.out / f"{bench.stage}-{number}.json" for number in range(len(arguments))]
    processes = []
    for file, given in zip(files, arguments, strict=True):
        file.unlink(missing_ok=True)
        own = (work, bench.out, file, bench.stage, bench.stands_in, takes_cpu_for_gpu, verifies, given)
        processes.append(multiprocessing.get_context("spawn").Process(target=_run, args=own))
        processes[-1].start()
    ends_at, children = time.monotonic() + bench.sized(1, 10) * deadline_s, []
    for file, process in zip(files, processes, strict=True):
        process.join(max(0.0, ends_at - time.monotonic()))
        hangs = process.is_alive()
        process.kill()
        process.join()
        figures = json.loads(file.read_text(encoding="utf-8"))["figures"] if file.exists() else {}
        children.append(Child(figures, "hangs" if hangs else f"ended with {process.exitcode}"))
    return children


def _run(
    work: Callable[..., None], out: Path, file: Path, stage: str, stands_in: bool, takes_cpu_for_gpu: bool,
    verifies: bool, given: Sequence[Any],
) -> None:  # fmt: skip
    bench = Bench(out=out, file=file, stands_in=stands_in, earlier={}, stage=stage)
    with standing_in(stands_in and takes_cpu_for_gpu, verifies=verifies):
        work(bench, *given)
    os._exit(0)  # do not wait for the libraries' threads, which may never end
