"""Measures the cost of `kill -9` in a bulk run: lost rows, duplicate rows, repeated work.

    python -m benchmarks.bulk.kills --rows 10000 --kills 20

Runs `python -m deployments.bulk` on its own engines and kills an engine, a reader process, or the driver with its
whole cluster, at random moments spread over the run. A killed driver is started again with --resume. Engines compute
the model of --model, or only sleep (--step-ms). A file that survives all processes counts every sampled token, so the
repeated work is known exactly. Progress goes to stderr; the last line of stdout is one JSON object:

    rows_lost, rows_twice, rows_different   rows without a result, with several, or with another text than without kills
    tokens_again_share    sampled tokens that are not in the results, over the tokens in the results
    rows_again_share      share of rows that were started again from nothing, as the run's own summary reports it
    rows_continued_share  share of rows that lost their engine or the driver, and resumed after their tokens
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bulk.bulk_run import ENGINE, BulkRun, own_engines, write_rows
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell

PATIENCE_S = 180.0
_LOOK_EVERY_S = 0.05
DRIVER = "driver"


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="carousel-kills-") as folder:
        return run_command(_parser(), lambda given: measure(Path(folder), given), arguments)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Compare a run without kills and a run with kills. Raises BenchmarkError if a run fails or makes no progress."""
    write_rows(folder / "rows.jsonl", rows(given))
    smooth = _run(folder, "smooth", given)
    began = time.monotonic()
    smooth.start()
    smooth.wait()
    tell(f"without kills: {time.monotonic() - began:.1f} s")
    rough = _run(folder, "rough", given)
    killed = _kill_at_random(rough, given)
    return {
        "rows": given.rows,
        "kills": dict(killed),
        **judged(smooth.results(), rough.results(), given.rows),
        **_costs(rough.summary(), num_drawn=_num_drawn(folder / "rough.tokens")),
    }


def judged(smooth: Sequence[dict[str, Any]], rough: Sequence[dict[str, Any]], num_rows: int) -> dict[str, int]:
    """Compare the records of a run with kills (`rough`) with those of a run without kills (`smooth`)."""
    counts = Counter(record["row"] for record in rough)
    texts = {record["row"]: record["text"] for record in smooth}
    return {
        "rows_lost": num_rows - len(counts),
        "rows_twice": sum(number > 1 for number in counts.values()),
        "rows_failed": sum(record["error"] is not None for record in rough),
        "rows_different": sum(record["text"] != texts[record["row"]] for record in rough),
    }


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows with random lengths around `--prompt` and `--output`."""
    chance = random.Random(given.seed)
    for number in range(given.rows):
        words = chance.randint(given.prompt // 2, given.prompt)
        yield {
            "id": f"row-{number}",
            "prompt": f"Count {number} " + "and on " * words,
            "max_tokens": chance.randint(max(1, given.output // 2), given.output * 3 // 2),
            "ignore_eos": True,
        }


def _run(folder: Path, name: str, given: argparse.Namespace) -> BulkRun:
    """Return a run that counts its tokens in `NAME.tokens` and resumes when it is started again."""
    model: dict[str, Any] = {"path": given.model}
    if given.step_ms is not None:
        model["simulated"] = {"step_ms": given.step_ms}
    engine = {"model": model, "scheduler": {"max_running": given.slots}}
    arguments = own_engines(folder, folder / "rows.jsonl", engine, num_engines=given.engines, num_cpus=0.1)
    program = ("-m", "benchmarks.bulk.counted", str(folder / f"{name}.tokens"))
    return BulkRun(folder / name, [*arguments, "--resume"], program=program)


def _kill_at_random(run: BulkRun, given: argparse.Namespace) -> Counter[str]:
    """Start the run and kill a process at random numbers of written rows. Return the number of kills by kind."""
    chance = random.Random(given.seed)
    moments = sorted(chance.sample(range(given.rows // 50, given.rows * 49 // 50), given.kills))
    kinds = [chance.choice(given.kinds.split(",")) for _ in moments]
    killed: Counter[str] = Counter()
    run.start()
    for moment, kind in zip(moments, kinds, strict=True):
        deadline = time.monotonic() + PATIENCE_S
        while run.num_records() < moment:
            if run.has_ended or time.monotonic() > deadline:
                raise BenchmarkError(f"the run stopped at {run.num_records():,} rows and did not reach {moment:,}")
            time.sleep(_LOOK_EVERY_S)
        killed[_kill(run, kind, chance)] += 1
        tell(f"{moment:,} rows: killed: {kind}")
    run.wait()
    return killed


def _kill(run: BulkRun, kind: str, chance: random.Random) -> str:
    """Kill one process and return its kind: an engine if no reader is left. Start a killed driver again."""
    if kind == DRIVER:
        run.kill_all()
        run.start()
        return kind
    while not run.kill(kind, chance):
        kind = ENGINE
        time.sleep(_LOOK_EVERY_S)
    return kind


def _num_drawn(count: Path) -> int:
    """Return the number of tokens that all engines have sampled."""
    return sum(map(int, count.read_text(encoding="utf-8").split()))


def _costs(summary: Mapping[str, Any], *, num_drawn: int) -> dict[str, Any]:
    num_kept = summary["completion_tokens"]
    return {
        "tokens": num_kept,
        "tokens_again_share": round((num_drawn - num_kept) / num_kept, 5),
        "rows_again_share": round(summary["recomputed_rows"] / summary["rows"], 5),
        "rows_continued_share": round(summary["continued_rows"] / summary["rows"], 5),
        "engines_lost": summary["engines_lost"],
        "runs": summary["runs"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bulk.kills", __doc__)
    parser.add_argument("--rows", type=positive, default=10_000, metavar="N")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--kinds", default="engine,reader,driver", metavar="KIND,…", help="kinds to draw from")
    parser.add_argument("--engines", type=positive, default=2, metavar="N")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="max_running of each engine")
    parser.add_argument("--model", default="models/demo", metavar="DIR")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="replace steps by sleeps; default: compute")
    parser.add_argument("--prompt", type=positive, default=16, metavar="N", help="most words of a prompt")
    parser.add_argument("--output", type=positive, default=32, metavar="N", help="mean output tokens")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
