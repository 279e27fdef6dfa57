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
    """A run without kills, then one with them. Raises BenchmarkError when a run does not come to its end."""
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
    """What has become of the rows: their records against those of a run in which nothing died."""
    counts = Counter(record["row"] for record in rough)
    texts = {record["row"]: record["text"] for record in smooth}
    return {
        "rows_lost": num_rows - len(counts),
        "rows_twice": sum(number > 1 for number in counts.values()),
        "rows_failed": sum(record["error"] is not None for record in rough),
        "rows_different": sum(record["text"] != texts[record["row"]] for record in rough),
    }


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of about the lengths that are asked for."""
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
    """A run that counts its tokens in `NAME.tokens`; started again, it goes on."""
    model: dict[str, Any] = {"path": given.model}
    if given.step_ms is not None:
        model["simulated"] = {"step_ms": given.step_ms}
    engine = {"model": model, "scheduler": {"max_running": given.slots}}
    arguments = own_engines(folder, folder / "rows.jsonl", engine, num_engines=given.engines, num_cpus=0.1)
    program = ("-m", "benchmarks.bulk.counted", str(folder / f"{name}.tokens"))
    return BulkRun(folder / name, [*arguments, "--resume"], program=program)


def _kill_at_random(run: BulkRun, given: argparse.Namespace) -> Counter[str]:
    """Start the run and kill whenever it has got so many rows further; the moments are spread over all of it."""
    chance = random.Random(given.seed)
    moments = sorted(chance.sample(range(given.rows // 50, given.rows * 49 // 50), given.kills))
    kinds = [chance.choice(given.kinds.split(",")) for _ in moments]
    killed: Counter[str] = Counter()
    run.start()
    for moment, kind in zip(moments, kinds, strict=True):
        deadline = time.monotonic() + PATIENCE_S
        while run.num_records() < moment:
            if run.has_ended or time.monotonic() > deadline:
                raise BenchmarkError(f"the run came to {run.num_records():,} rows and not to {moment:,}")
            time.sleep(_LOOK_EVERY_S)
        killed[_kill(run, kind, chance)] += 1
        tell(f"{moment:,} rows: killed: {kind}")
    run.wait()
    return killed


def _kill(run: BulkRun, kind: str, chance: random.Random) -> str:
    """Kill one of a kind, an engine where all rows have been read; returns the kind. A killed driver starts again."""
    if kind == DRIVER:
        run.kill_all()
        run.start()
        return kind
    while not run.kill(kind, chance):
        kind = ENGINE
        time.sleep(_LOOK_EVERY_S)
    return kind


def _num_drawn(count: Path) -> int:
    """Tokens that any engine has drawn."""
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
    parser.add_argument("--kinds", default="engine,reader,driver", metavar="KIND,…", help="chosen from at random")
    parser.add_argument("--engines", type=positive, default=2, metavar="N")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="of each engine (max_running)")
    parser.add_argument("--model", default="models/demo", metavar="DIR")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="engines that only sleep so long; default: compute")
    parser.add_argument("--prompt", type=positive, default=16, metavar="N", help="words, at most")
    parser.add_argument("--output", type=positive, default=32, metavar="N", help="tokens, on average")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
