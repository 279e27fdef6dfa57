"""What `kill -9` costs a bulk run: rows lost, rows twice, work done again.

    python -m benchmarks.bulk.kills --rows 10000 --kills 20

Runs `python -m deployments.bulk` on engines of its own and kills an engine, a process that reads, or the driver with
its whole cluster, at random moments over all of the run; after the driver's death it goes on with --resume. Engines
compute the model of --model, or only sleep (--step-ms). Every token that any engine draws is counted in a file that
outlives all of them, so what was computed twice is known exactly. Progress goes to stderr; the last line of stdout is
one JSON object:

    rows_lost, rows_twice, rows_different   against the input, and against the texts of a run without kills
    tokens_again_share    tokens drawn beyond those in the results, over those
    rows_again_share      rows that began again from nothing, over all, as the run's own summary tells it
    rows_continued_share  rows that had begun, lost their engine or the driver, and went on after their tokens
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.command import (
    BenchmarkError,
    add_json_option,
    command_parser,
    positive,
    report,
    tell,
)
from benchmarks.harness.processes import family

PATIENCE_S = 180.0
_LOOK_EVERY_S = 0.05
_KINDS = {"engine": "ray::EngineActor", "reader": "ray::MapWorker"}

# A bulk run whose engines count what they draw: one line of text for each step, appended by one system call.
_COUNTING = """
import os, sys
from deployments.bulk import engine_actor, pool
from deployments.bulk.__main__ import main

class Counting(engine_actor.EngineActor):
    def load(self):
        facts = super().load()
        book, count = self._rows._book, os.open({count!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        def counted(deltas):
            os.write(count, b"%d\\n" % sum(len(delta.token_ids) for delta in deltas))
            book(deltas)
        self._rows._book = counted
        return facts

Counting.__name__ = Counting.__qualname__ = "EngineActor"
pool.EngineActor = Counting
sys.exit(main())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="carousel-kills-") as folder:
            return measure(Path(folder), given)

    return report(measured, given)


def measure(folder: Path, given: argparse.Namespace, *, cluster_pid: int | None = None) -> dict[str, Any]:
    """A run without kills, then one with them, on clusters of their own or on that of RAY_ADDRESS.

    `cluster_pid` is where the processes of such a cluster come from. Raises BenchmarkError when a run does not come to
    its end.
    """
    write_rows(folder / "rows.jsonl", given)
    (folder / "serve.yaml").write_text(json.dumps(_serve_file(given)), encoding="utf-8")  # JSON is YAML
    smooth = _Run(folder, "smooth", cluster_pid)
    began = time.monotonic()
    smooth.start()
    smooth.wait()
    tell(f"without kills: {time.monotonic() - began:.1f} s")
    rough = _Run(folder, "rough", cluster_pid)
    killed = _kill_at_random(rough, given)
    return {
        "rows": given.rows,
        "kills": dict(killed),
        **judged(smooth.results(), rough.results(), given.rows),
        **_costs(rough),
    }


def judged(smooth: Sequence[dict[str, Any]], rough: Sequence[dict[str, Any]], num_rows: int) -> dict[str, int]:
    """What has become of the rows: their records against those of a run in which nothing died."""
    counts = Counter(record["row"] for record in rough)
    texts = {record["row"]: record["text"] for record in smooth}
    return {
        "rows_lost": num_rows - len(counts),
        "rows_twice": sum(number > 1 for number in counts.values()),
        "rows_failed": sum(record["error"] is not None for record in rough),
        "rows_different": sum(record["text"] != texts[record["row"]] for record in rough),
    }


def write_rows(path: Path, given: argparse.Namespace) -> None:
    """Rows of about the lengths that are asked for."""
    chance = random.Random(given.seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(given.rows):
            words = chance.randint(given.prompt // 2, given.prompt)
            row = {
                "id": f"row-{number}",
                "prompt": f"Count {number} " + "and on " * words,
                "max_tokens": chance.randint(max(1, given.output // 2), given.output * 3 // 2),
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


class _Run:
    """One output folder, and the processes that work on it, one after the other."""

    def __init__(self, folder: Path, name: str, cluster_pid: int | None) -> None:
        self._folder = folder
        self._cluster_pid = cluster_pid
        self._out = folder / name
        self._count = folder / f"{name}.tokens"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", _COUNTING.format(count=str(self._count)), "--resume"]
        command += ["--input", str(self._folder / "rows.jsonl"), "--output", str(self._out)]
        command += ["--config", str(self._folder / "serve.yaml")]
        self._process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)

    def wait(self) -> None:
        """Until it ends. Raises BenchmarkError when that is not its good end."""
        status = self._running.wait()
        if status:
            raise BenchmarkError(f"the bulk run ended with status {status}")

    @property
    def has_ended(self) -> bool:
        return self._running.poll() is not None

    @property
    def num_done(self) -> int:
        """Records so far."""
        journal = self._out / "results.partial.jsonl"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def kill(self, kind: str, chance: random.Random) -> bool:
        """Kill one of a kind; whether there was one."""
        if kind == "driver":
            for pid in family(self._running.pid):  # with the cluster that it has started: as when a node dies
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._running.wait()
            return True
        members = family(self._cluster_pid or self._running.pid).values()
        found = [each.pid for each in members if each.title.startswith(_KINDS[kind])]
        if found:
            os.kill(chance.choice(found), signal.SIGKILL)
        return bool(found)

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._out / "results.jsonl").read_text(encoding="utf-8").splitlines()]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self._out / "summary.json").read_text(encoding="utf-8")))

    def num_drawn(self) -> int:
        """Tokens that any engine has drawn."""
        return sum(map(int, self._count.read_text(encoding="utf-8").split()))

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "started before it is used"
        return self._process


def _kill_at_random(run: _Run, given: argparse.Namespace) -> Counter[str]:
    """Start the run and strike whenever it has got so many rows further; the moments are spread over all of it."""
    chance = random.Random(given.seed)
    moments = sorted(chance.sample(range(given.rows // 50, given.rows * 49 // 50), given.kills))
    kinds = [chance.choice(given.kinds.split(",")) for _ in moments]
    killed: Counter[str] = Counter()
    run.start()
    for moment, kind in zip(moments, kinds, strict=True):
        deadline = time.monotonic() + PATIENCE_S
        while run.num_done < moment:
            if run.has_ended or time.monotonic() > deadline:
                raise BenchmarkError(f"the run came to {run.num_done:,} rows and not to {moment:,}")
            time.sleep(_LOOK_EVERY_S)
        while not run.kill(kind, chance):
            kind = "engine" if kind == "reader" else kind  # everything may have been read by now
            time.sleep(_LOOK_EVERY_S)
        killed[kind] += 1
        tell(f"{moment:,} rows: killed: {kind}")
        if kind == "driver":
            run.start()
    run.wait()
    return killed


def _costs(run: _Run) -> dict[str, Any]:
    summary = run.summary()
    num_kept, num_drawn = summary["completion_tokens"], run.num_drawn()
    return {
        "tokens": num_kept,
        "tokens_again_share": round((num_drawn - num_kept) / num_kept, 5),
        "rows_again_share": round(summary["recomputed_rows"] / summary["rows"], 5),
        "rows_continued_share": round(summary["continued_rows"] / summary["rows"], 5),
        "engines_lost": summary["engines_lost"],
        "runs": summary["runs"],
    }


def _serve_file(given: argparse.Namespace) -> dict[str, Any]:
    model: dict[str, Any] = {"path": given.model}
    if given.step_ms is not None:
        model["simulated"] = {"step_ms": given.step_ms}
    served = {
        "name": "bulk",
        "engine": {"model": model, "scheduler": {"max_running": given.slots}},
        "replicas": {"num_replicas": given.engines, "num_cpus": 0.1},
    }
    application = {
        "name": "carousel",
        "import_path": "deployments.serve.application:build",
        "args": {"models": [served]},
    }
    return {"applications": [application]}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bulk.kills", __doc__)
    parser.add_argument("--rows", type=positive, default=10_000, metavar="N")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--kinds", default="engine,reader,driver", metavar="KIND,…", help="chosen from at random")
    parser.add_argument("--engines", type=positive, default=2, metavar="N")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="of each engine (max_running)")
    parser.add_argument("--model", default="models/demo", metavar="DIR")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="engines that only sleep so long; default: compute")
    parser.add_argument("--prompt", type=positive, default=16, metavar="N", help="words, at most")
    parser.add_argument("--output", type=positive, default=32, metavar="N", help="tokens, on average")
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
