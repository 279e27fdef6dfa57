"""The memory of a bulk run's driver, and of the processes beside it, over very many rows.

    python -m benchmarks.bulk.memory --rows 1000000

Runs `python -m deployments.bulk` on a cluster of its own, with an engine that does not even sleep, over short rows, and
looks at what its processes hold while it goes. stderr gets a line for each look; the last line of stdout is one JSON
object:

    driver_peak_mib, readers_peak_mib, engines_peak_mib   of all processes of a kind together, as they were resident
    driver_mib_per_100k_rows   how the driver grew over the second half of the rows (least squares)
    table                      the looks: seconds, rows done, MiB of driver, readers, engines
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bulk.bulk_run import ENGINE, READER, BulkRun, own_engines, write_rows
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.processes import Process, resident_mib


@dataclass(frozen=True, slots=True)
class Look:
    """What the processes held at a moment. MiB."""

    seconds: float
    rows: int
    driver: float
    readers: float
    engines: float


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="carousel-memory-") as folder:
        return run_command(_parser(), lambda given: measure(Path(folder), given), arguments)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One run. Raises BenchmarkError when it does not come to its end."""
    write_rows(folder / "rows.jsonl", rows(given))
    engine = {
        "model": {"path": given.model, "simulated": {"step_ms": 0}},
        "scheduler": {"max_running": given.slots},
    }
    arguments = own_engines(folder, folder / "rows.jsonl", engine, num_engines=given.engines, num_cpus=0.1)
    run = BulkRun(folder / "out", arguments)
    run.start()
    try:
        looks = list(_looks(run, given.every))
        run.wait()
    finally:
        run.kill_all()
    summary = run.summary()
    return {
        "rows": summary["rows"],
        "rows_failed": summary["failed"],
        "seconds": summary["seconds"],
        "driver_peak_mib": max(look.driver for look in looks),
        "readers_peak_mib": max(look.readers for look in looks),
        "engines_peak_mib": max(look.engines for look in looks),
        "driver_mib_per_100k_rows": growth(looks, given.rows),
        "table": [astuple(look) for look in looks],
    }


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows that cost an engine next to nothing."""
    chance = random.Random(given.seed)
    for number in range(given.rows):
        yield {"id": f"row-{number}", "prompt": f"Count {number}", "max_tokens": chance.randint(1, given.output)}


def growth(looks: Sequence[Look], num_rows: int) -> float | None:
    """MiB that the driver gets larger for each 100,000 rows, from the middle of the run on; None: too few looks."""
    late = [look for look in looks if num_rows / 2 <= look.rows < num_rows]
    if len({look.rows for look in late}) < 2:
        return None
    line = statistics.linear_regression([look.rows / 100_000 for look in late], [look.driver for look in late])
    return round(line.slope, 2)


def _looks(run: BulkRun, every_s: float) -> Iterator[Look]:
    began = time.monotonic()
    tell(f"{'seconds':>8} {'rows':>10} {'driver':>8} {'readers':>8} {'engines':>8}  MiB")
    while not run.has_ended:
        look = Look(
            round(time.monotonic() - began, 1),
            run.num_records(),
            *(_mib(run.processes(kind)) for kind in (None, READER, ENGINE)),
        )
        tell(f"{look.seconds:8.1f} {look.rows:10,} {look.driver:8.1f} {look.readers:8.1f} {look.engines:8.1f}")
        yield look
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(every_s)


def _mib(processes: Sequence[Process]) -> float:
    return round(sum(resident_mib(each.pid) for each in processes), 1)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bulk.memory", __doc__)
    parser.add_argument("--rows", type=positive, default=1_000_000, metavar="N")
    parser.add_argument("--output", type=positive, default=3, metavar="N", help="tokens of a row, at most")
    parser.add_argument("--engines", type=positive, default=1, metavar="N")
    parser.add_argument("--slots", type=positive, default=256, metavar="N", help="of each engine (max_running)")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="its tokenizer and sizes are used")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
