"""What a service lends to a bulk run, and what that costs its online clients.

    python -m benchmarks.bulk.lending --rounds 2 --seconds 20 --step-ms 20

Starts the service as `make serve` does, with replicas that only sleep, and drives it with `benchmarks.service.online`:
without a bulk run and beside one (`python -m deployments.bulk --through fleet`), in turn. Once the bulk run has the
service for itself: that is its whole capacity. Progress goes to stderr; the last line of stdout is one JSON object:

    off, on           the online client's times without and beside the bulk run, the median of the rounds, seconds
    ratio             of the two, for each
    alone_tokens_per_s, online_tokens_per_s
    idle_share        the bulk run's tokens over what online clients leave of the whole capacity
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bulk.bulk_run import BulkRun, write_rows
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.service import Service, service
from benchmarks.harness.turns import last_object, run_module
from benchmarks.service.fleet import MODEL_NAME

TIMES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
_FILL_S = 5.0  # until a bulk run has found out how much it gets
_FIRST_TOKEN, _LAST_TOKEN = 300, 600
_NUM_ROWS = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measured, arguments)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="carousel-lending-") as folder, service(application(given)) as running:
        return measure(running, Path(folder), given)


def application(given: argparse.Namespace) -> dict[str, Any]:
    """Replicas with steps of the cost that is asked for."""
    costs = {"step_ms": given.step_ms, "per_token_ms": given.per_token_ms}
    engine = {
        "model": {"path": "models/demo", "simulated": costs},
        "scheduler": {"max_running": given.slots} | json.loads(given.scheduler),
    }
    replicas = {"num_replicas": given.replicas, "num_cpus": 0.1}
    return {"models": [{"name": MODEL_NAME, "engine": engine, "replicas": replicas}]}


def measure(running: Service, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds. Raises BenchmarkError when a part of it fails."""
    rows, requests = folder / "rows.jsonl", folder / "requests.jsonl"
    write_rows(rows, rows_of(_NUM_ROWS, ("id", "prompt"), given.bulk_prompt, given.bulk_output, seed="rows"))
    write_rows(requests, rows_of(500, ("id", "prompt_token_ids"), given.prompt, given.output, seed="requests"))
    url = f"http://{running.target.host}:{running.target.port}"
    alone = bulk_run(rows, folder / "alone", url)
    with alone.running():
        time.sleep(_FILL_S)
        pace = Pace(alone)
        time.sleep(given.seconds / 2)
        alone_tokens, alone_s = pace.so_far()
        alone_tokens_per_s = alone_tokens / alone_s
    tell(f"the bulk run alone: {alone_tokens_per_s:,.0f} tokens/s")
    off, on, bulk, left = [], [], [], []
    for number in range(given.rounds):
        off.append(online(url, requests, given, seed=number))
        beside = bulk_run(rows, folder / f"beside-{number}", url)
        with beside.running():
            time.sleep(_FILL_S)
            pace = Pace(beside)
            on.append(online(url, requests, given, seed=number))
            bulk_tokens, window_s = pace.so_far()
        # Over one stretch of time, in which the client also starts and waits for its last answers.
        left.append(alone_tokens_per_s * window_s - on[-1]["num_output_tokens"])
        bulk.append(bulk_tokens)
        tell(f"round {number + 1}: " + ", ".join(f"{name} {off[-1][name]:.4f} -> {on[-1][name]:.4f}" for name in TIMES))
    medians = {name: (_median(off, name), _median(on, name)) for name in TIMES}
    return {
        "off": {name: without for name, (without, _) in medians.items()},
        "on": {name: beside for name, (_, beside) in medians.items()},
        "ratio": {name: round(beside / without, 3) for name, (without, beside) in medians.items()},
        "alone_tokens_per_s": round(alone_tokens_per_s, 1),
        "online_tokens_per_s": round(_median(on, "output_tokens_per_s"), 1),
        "idle_share": round(sum(bulk) / sum(left), 3),
    }


class Pace:
    """Tokens that a bulk run generates from a moment on."""

    def __init__(self, run: BulkRun) -> None:
        self._run = run
        self._began_at, self._began_with = time.perf_counter(), run.num_tokens()

    def so_far(self) -> tuple[int, float]:
        """Tokens of rows that have ended since then, and the seconds."""
        return self._run.num_tokens() - self._began_with, time.perf_counter() - self._began_at


def bulk_run(rows: Path, out: Path, url: str) -> BulkRun:
    return BulkRun(out, ["--through", "fleet", "--base-url", url, "--input", str(rows)])


def online(url: str, requests: Path, given: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """The figures of `benchmarks.service.online`. Raises BenchmarkError when it fails."""
    arguments = ["--base-url", url, "--model", MODEL_NAME, "--workload", str(requests), "--seed", str(seed)]
    arguments += ["--rate", str(given.rate), "--duration", str(given.seconds)]
    return last_object(run_module("benchmarks.service.online", arguments))


def rows_of(number: int, names: tuple[str, str], prompt: int, output: int, *, seed: str) -> Iterator[dict[str, Any]]:
    """Rows of random tokens: prompts and outputs of half to one and a half times the length that is asked for."""
    chance = random.Random(seed)
    row_id, tokens = names
    for index in range(number):
        length = chance.randint(max(1, prompt // 2), prompt * 3 // 2)
        yield {
            row_id: f"{seed}-{index}",
            tokens: chance.choices(range(_FIRST_TOKEN, _LAST_TOKEN), k=length),
            "max_tokens": chance.randint(max(1, output // 2), output * 3 // 2),
            "ignore_eos": True,
        }


def _median(runs: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bulk.lending", __doc__)
    parser.add_argument("--replicas", type=positive, default=2, metavar="N")
    parser.add_argument("--slots", type=positive, default=16, metavar="N", help="of each replica (max_running)")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS", help="of a simulated step")
    parser.add_argument("--per-token-ms", type=float, default=0.0, metavar="MS", help="more, for each token of a step")
    parser.add_argument("--scheduler", default="{}", metavar="JSON", help="more settings of the scheduler")
    parser.add_argument("--rate", type=float, default=12.0, metavar="R", help="online requests a second")
    parser.add_argument("--prompt", type=positive, default=32, metavar="N", help="tokens, on average")
    parser.add_argument("--output", type=positive, default=64, metavar="N", help="tokens, on average")
    parser.add_argument("--bulk-prompt", type=positive, default=64, metavar="N", help="tokens, on average")
    parser.add_argument("--bulk-output", type=positive, default=64, metavar="N", help="tokens, on average")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each online run")
    parser.add_argument("--rounds", type=positive, default=2, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
