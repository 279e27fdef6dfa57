"""How fast a bulk run's own engine is, in turn with the same engine stepped in a loop (`benchmarks.engine.throughput`).

    python -m benchmarks.make_workload uniform --vocab 763 --requests 10000 --out rows.jsonl
    python -m benchmarks.bulk.pool --model models/demo --workload rows.jsonl --rounds 3

Both get the same rows, threads and settings, in one process each, in turn. The bulk run's time goes from
the moment its engine has loaded to the last record; it reads, checks and decodes rows beside the engine and writes
records, which the loop does not. Progress goes to stderr; the last line of stdout is one JSON object with the medians
of generated tokens a second and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.cores import num_cores
from benchmarks.bulk.bulk_run import BulkRun, own_engines, write_rows
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.turns import last_object, run_module, turns


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="carousel-pool-") as folder:
        return run_command(_parser(), lambda given: measure(Path(folder), given), arguments)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds. Raises BenchmarkError when a run fails."""
    write_rows(folder / "rows.jsonl", rows_of(Path(given.workload)))
    kinds = {
        "loop": lambda number: loop_tokens_per_s(given),
        "pool": lambda number: pool_tokens_per_s(folder, number, given),
    }
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for number, name in turns(list(kinds), rounds=given.rounds):
        speeds[name].append(kinds[name](number))
        tell(f"round {number}: {name} {speeds[name][-1]:,.0f} tokens/s")
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        "loop_tokens_per_s": medians["loop"],
        "pool_tokens_per_s": medians["pool"],
        "ratio": round(medians["pool"] / medians["loop"], 4),
        "all_tokens_per_s": speeds,
    }


def rows_of(workload: Path) -> Iterator[dict[str, Any]]:
    """The lines of a workload as rows of a bulk run: greedy, as `benchmarks.engine.throughput` draws."""
    for text in workload.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        line["prompt"] = line.pop("prompt_token_ids")
        yield line | {"temperature": 0}


def loop_tokens_per_s(given: argparse.Namespace) -> float:
    arguments = ["--model", given.model, "--workload", given.workload, "--repeat", "1", "--threads", str(given.threads)]
    arguments += ["--set", f"scheduler.max_running={given.slots}", f"cache.memory_gib={given.memory_gib}"]
    return float(last_object(run_module("benchmarks.engine.throughput", arguments))["output_tokens_per_s"])


def pool_tokens_per_s(folder: Path, number: int, given: argparse.Namespace) -> float:
    engine = {
        "model": {"path": str(Path(given.model).absolute()), "num_threads": given.threads},
        "cache": {"memory_gib": given.memory_gib},
        "scheduler": {"max_running": given.slots},
    }
    arguments = own_engines(folder, folder / "rows.jsonl", engine, num_engines=1, num_cpus=1)
    run = BulkRun(folder / f"out-{number}", [*arguments, "--fail-on-row-errors"])
    run.start()
    run.wait()
    return float(run.summary()["tokens_per_s"])


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bulk.pool", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--workload", required=True, metavar="FILE.jsonl", help="one request a line")
    parser.add_argument("--threads", type=positive, default=num_cores(), metavar="N", help="CPU threads")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="of the engine (max_running)")
    parser.add_argument("--memory-gib", type=float, default=0.25, metavar="GIB", help="KV memory")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
