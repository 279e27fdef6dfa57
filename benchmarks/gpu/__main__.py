"""Every figure of a GPU: `python -m benchmarks.gpu --out FOLDER [--stages rates decode] [--budget-s 570]`.

Each stage runs in a process of its own, with its own deadline, and appends one JSON line to FOLDER/results.jsonl; a
table in Markdown comes last, also as FOLDER/table.md. A stage that fails leaves its error, and the next goes on. A
second call with the same folder goes on where the first stopped: stages with a result of this code on this device are
left out unless --again. With --stand-in every stage runs on a CPU, with tiny sizes and Triton's interpreter: the code
is tried, and the figures are no claims.

Needs torch with CUDA, Triton, transformers and pydantic; neither Ray nor anything of the HTTP API.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.versions import commit
from benchmarks.gpu.results import NO_CLAIM, STAGES, Result, ResultsFile, Stage, report
from benchmarks.harness.command import BenchmarkError, command_parser, did_you_mean, refused, tell
from benchmarks.harness.machine import PROJECT, environment

_EARLIER = "earlier.json"
_LAST_CHARACTERS = 2_000  # of what a stage said that failed
_ASK_DEVICE = """
import importlib.util, torch
assert torch.cuda.is_available(), "torch sees no CUDA device"
assert importlib.util.find_spec("triton"), "triton is not installed"
print(torch.cuda.get_device_name())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.run is not None:
        return _run(_named([given.run])[0], given)
    try:
        stages = _named(given.stages) if given.stages else STAGES
        device = NO_CLAIM if given.stand_in else _device()
        given.out.mkdir(parents=True, exist_ok=True)
    except (BenchmarkError, OSError) as error:
        return refused(error)
    code, file = _code(), ResultsFile(given.out / "results.jsonl")
    began_at, has_failed = time.monotonic(), False
    for stage in stages:
        known = file.of(code=code, device=device).get(stage.name)
        if known is not None and known.error is None and not given.again:
            tell(f"{stage.name}: measured already at {known.at}")
            continue
        left_s = given.budget_s - (time.monotonic() - began_at)
        if left_s < stage.expected_s:
            tell(f"{stage.name}: not begun, {left_s:.0f} s are left and it takes some {stage.expected_s} s")
            continue
        _write_earlier(given.out, file.of(code=code, device=device))
        result = _measured(stage, given, code=code, device=device, deadline_s=min(left_s, stage.deadline_s))
        has_failed |= result.error is not None
        file.append(result)
    text = report(file.of(code=code, device=device), code=code, device=device)
    (given.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return int(has_failed)


def _measured(stage: Stage, given: argparse.Namespace, *, code: str, device: str, deadline_s: float) -> Result:
    """Run one stage in a process of its own."""
    tell(f"{stage.name}: {stage.measures} (at most {deadline_s:.0f} s)")
    kept, log = given.out / f"{stage.name}.json", given.out / f"{stage.name}.log"
    kept.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--run", stage.name, "--out", str(given.out)]
    began_at = time.monotonic()
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [*command, "--stand-in"] if given.stand_in else command,
            stdout=said, stderr=subprocess.STDOUT, cwd=PROJECT, env=_environment(given.stand_in),
            start_new_session=True,
        )  # fmt: skip
        error = _end_of(process, deadline_s)
    seconds = time.monotonic() - began_at
    if error is not None:
        error = f"{error}: {log.read_text(encoding='utf-8', errors='replace')[-_LAST_CHARACTERS:].strip()}"
        tell(f"{stage.name} failed: {error}")
    return Result(
        stage=stage.name,
        code=code,
        commit=commit(),
        device=device,
        at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        seconds=round(seconds, 1),
        note=NO_CLAIM if given.stand_in else None,
        error=error,
        **_read(kept),
    )


def _end_of(process: subprocess.Popen[bytes], deadline_s: float) -> str | None:
    """Wait for a stage; None if it came to its end without an error. What it started ends with it."""
    try:
        status = process.wait(deadline_s)
        return None if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        return f"stopped after {deadline_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run(stage: Stage, given: argparse.Namespace) -> int:
    """In the stage's own process."""
    import torch

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.graphs import standing_in

    torch.set_num_threads(min(torch.get_num_threads(), 16))
    bench = Bench(
        out=given.out,
        file=given.out / f"{stage.name}.json",
        stands_in=given.stand_in,
        earlier=_read(given.out / _EARLIER),
    )
    module = importlib.import_module(stage.module)
    with standing_in(given.stand_in):
        module.measure(bench)
    return 0


def _environment(stands_in: bool) -> Mapping[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return environment() | offline | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if stands_in else {})


def _device() -> str:
    """The card's name. In a process of its own: CUDA in this one would take memory from the stages.

    Raises BenchmarkError where there is none.
    """
    done = subprocess.run([sys.executable, "-c", _ASK_DEVICE], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    why = done.stderr.strip().rpartition("\n")[2].removeprefix("AssertionError: ")
    raise BenchmarkError(
        f"stages need a GPU: {why}. With --stand-in every stage runs on a CPU: that tries the code, it measures nothing"
    )


def _code() -> str:
    """A digest of the files that are measured: results of other code do not count, committed or not."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*(PROJECT / "app").rglob("*.py"), *(PROJECT / "benchmarks").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_earlier(out: Path, results: Mapping[str, Result]) -> None:
    """What a stage may look up of those before it."""
    figures = {name: result.figures for name, result in results.items()}
    (out / _EARLIER).write_text(json.dumps(figures), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _named(names: Sequence[str]) -> tuple[Stage, ...]:
    """Raises BenchmarkError when there is no such stage."""
    known = {stage.name: stage for stage in STAGES}
    for name in names:
        if name not in known:
            raise BenchmarkError(f"there is no stage {name!r}{did_you_mean(name, known)}")
    return tuple(stage for stage in STAGES if stage.name in names)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results, logs and the table")
    parser.add_argument(
        "--stages", nargs="+", metavar="STAGE", help=f"only these, of {', '.join(stage.name for stage in STAGES)}"
    )
    parser.add_argument(
        "--budget-s", type=float, default=3600.0, metavar="S", help="no stage begins that this time does not hold"
    )
    parser.add_argument("--again", action="store_true", help="also stages that have a result")
    parser.add_argument("--stand-in", action="store_true", help="on a CPU, with figures that are no claims")
    parser.add_argument("--run", metavar="STAGE", help=argparse.SUPPRESS)  # the driver's own: in this process
    return parser


if __name__ == "__main__":
    sys.exit(main())
