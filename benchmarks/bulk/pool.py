"""How fast a bulk run's own engine is, in turn with the same engine stepped in a loop (`benchmarks.engine.throughput`).

    python -m benchmarks.make_workload uniform --vocab 763 --requests 10000 --out rows.jsonl
    python -m benchmarks.bulk.pool --model models/demo --workload rows.jsonl --rounds 3

Both get the same rows, threads and settings, in one process each, one after the other. The bulk run's time goes from
the moment its engine has loaded to the last record; it reads, checks and decodes rows beside the engine and writes
records, which the loop does not. Progress goes to stderr; the last line of stdout is one JSON object with the medians
of generated tokens a second and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import (
    BenchmarkError,
    add_json_option,
    command_parser,
    num_usable_cores,
    positive,
    report,
    tell,
)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="carousel-pool-") as folder:
            return measure(Path(folder), given)

    return report(measured, given)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds. Raises BenchmarkError when a run fails."""
    (folder / "rows.jsonl").write_text(rows_of(Path(given.workload)), encoding="utf-8")
    (folder / "serve.yaml").write_text(json.dumps(_serve_file(given)), encoding="utf-8")  # JSON is YAML
    loop, pool = [], []
    for number in range(1, given.rounds + 1):
        loop.append(_loop_tokens_per_s(given))
        pool.append(_pool_tokens_per_s(folder, number))
        tell(f"round {number}: loop {loop[-1]:,.0f} tokens/s, pool {pool[-1]:,.0f}")
    return {
        "loop_tokens_per_s": statistics.median(loop),
        "pool_tokens_per_s": statistics.median(pool),
        "ratio": round(statistics.median(pool) / statistics.median(loop), 4),
        "all_loop_tokens_per_s": loop,
        "all_pool_tokens_per_s": pool,
    }


def rows_of(workload: Path) -> str:
    """The lines of a workload as rows of a bulk run: greedy, as `benchmarks.engine.throughput` draws."""
    lines = []
    for text in workload.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        line["prompt"] = line.pop("prompt_token_ids")
        lines.append(json.dumps(line | {"temperature": 0}) + "\n")
    return "".join(lines)


def _loop_tokens_per_s(given: argparse.Namespace) -> float:
    command = ["benchmarks.engine.throughput", "--model", given.model, "--workload", given.workload, "--repeat", "1"]
    command += ["--threads", str(given.threads), "--set", f"scheduler.max_running={given.slots}"]
    command += [f"cache.memory_gib={given.memory_gib}"]
    return float(json.loads(_run(command).splitlines()[-1])["output_tokens_per_s"])


def _pool_tokens_per_s(folder: Path, number: int) -> float:
    out = folder / f"out-{number}"
    command = ["deployments.bulk", "--input", str(folder / "rows.jsonl"), "--output", str(out)]
    _run([*command, "--config", str(folder / "serve.yaml"), "--fail-on-row-errors"])
    return float(json.loads((out / "summary.json").read_text(encoding="utf-8"))["tokens_per_s"])


def _run(command: list[str]) -> str:
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{command[0]} ended with status {done.returncode}")
    return done.stdout


def _serve_file(given: argparse.Namespace) -> dict[str, Any]:
    served = {
        "name": "bulk",
        "engine": {
            "model": {"path": str(Path(given.model).absolute()), "num_threads": given.threads},
            "cache": {"memory_gib": given.memory_gib},
            "scheduler": {"max_running": given.slots},
        },
        "replicas": {"num_replicas": 1, "num_cpus": 1},
    }
    application = {
        "name": "carousel",
        "import_path": "deployments.serve.application:build",
        "args": {"models": [served]},
    }
    return {"applications": [application]}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bulk.pool", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--workload", required=True, metavar="FILE.jsonl", help="one request a line")
    parser.add_argument("--threads", type=positive, default=num_usable_cores(), metavar="N", help="CPU threads")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="of the engine (max_running)")
    parser.add_argument("--memory-gib", type=float, default=0.25, metavar="GIB", help="KV memory")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    add_json_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
