"""Measure every figure of a GPU: `python -m benchmarks.gpu --out FOLDER [--stages rates decode] [--budget-s 570]`.

Each stage runs in its own process with its own deadline, and appends one JSON line to FOLDER/results.jsonl. A table in
Markdown is printed last and written to FOLDER/table.md. Figures with targets are measured first, and twice. If a stage
fails, its error is recorded and the next stage runs. A second call with the same folder resumes where the first call
stopped, even in the middle of a stage. Without --again, a stage is skipped if it has a result on this device with the
present files. FOLDER has the kernels that Triton has compiled: copy the whole folder back, and to the next machine.

On a card that has never run this code, begin with --first-contact. It takes some three minutes, and then
FOLDER/results.jsonl says which backends work and why the others fail.

With --stand-in every stage runs on a CPU, with tiny sizes and Triton's interpreter. This tests the code; the figures
are no claims.

Needs torch with CUDA, Triton, transformers and pydantic; neither Ray nor any part of the HTTP API.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.versions import commit
from benchmarks.gpu.card import WatchedCard
from benchmarks.gpu.results import NO_CLAIM, STAGES, Result, ResultsFile, Stage, measured, report, summed_up
from benchmarks.gpu.stage_files import digest_of
from benchmarks.harness.command import BenchmarkError, above_zero, command_parser, did_you_mean, refused, tell
from benchmarks.harness.machine import PROJECT, environment

_EARLIER = "earlier.json"
_FIRST_CONTACT = "contact"
_LOOK_EVERY_S = 5.0  # how often to query the card during a stage; each query makes the driver work
_LAST_CHARACTERS = 2_000  # of the output of a failed stage
_ASK_DEVICE = """
import importlib.util, torch
assert torch.cuda.is_available(), "torch sees no CUDA device"
assert importlib.util.find_spec("triton"), "triton is not installed"
print(torch.cuda.get_device_name())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    given.out = given.out.resolve()
    if given.run is not None:
        return _run(_named([given.run])[0], given)
    try:
        names = [_FIRST_CONTACT] if given.first_contact else given.stages
        stages = _named(names) if names else STAGES
        device = NO_CLAIM if given.stand_in else _device()
        given.out.mkdir(parents=True, exist_ok=True)
    except (BenchmarkError, OSError) as error:
        return refused(error)
    codes = {stage.name: digest_of(stage.module, stage.also) for stage in STAGES}
    file = ResultsFile(given.out / "results.jsonl")
    began_at, has_failed = time.monotonic(), False
    for stage, number in _passes(stages):
        known = file.of(device) if given.keep else _current(file.of(device), codes)
        done = measured(known.get(stage.name, ()))
        if len(done) >= number and not given.again:
            tell(f"{stage.name}: measured already at {done[-1].at}")
            continue
        left_s = given.budget_s - (time.monotonic() - began_at)
        if left_s < given.slow * stage.expected_s:
            tell(f"{stage.name}: not started: {left_s:.0f} s are left, and the stage takes some {stage.expected_s} s")
            continue
        _write_earlier(given.out, known)
        deadline_s = min(left_s, stage.deadline_s(given.slow))
        result = _measured(stage, given, code=codes[stage.name], device=device, deadline_s=deadline_s)
        has_failed |= result.error is not None
        file.append(result)
    found = file.of(device)
    text = report({**found, **_current(found, codes)}, codes=codes, device=device)
    (given.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return int(has_failed)


def _passes(stages: Sequence[Stage]) -> Iterator[tuple[Stage, int]]:
    """Yield each stage and its pass: first contact comes first, and second passes precede stages measured once."""
    yield from ((stage, 1) for stage in stages if stage.name == _FIRST_CONTACT)
    stages = [stage for stage in stages if stage.name != _FIRST_CONTACT]
    repeated = [stage for stage in stages if stage.num_passes > 1]
    yield from ((stage, 1) for stage in repeated)
    yield from ((stage, 2) for stage in repeated)
    yield from ((stage, 1) for stage in stages if stage.num_passes == 1)


def _current(found: Mapping[str, Sequence[Result]], codes: Mapping[str, str]) -> dict[str, Sequence[Result]]:
    """Return the results whose files have not changed since."""
    kept = {name: [each for each in results if each.code == codes.get(name)] for name, results in found.items()}
    return {name: results for name, results in kept.items() if results}


def _measured(stage: Stage, given: argparse.Namespace, *, code: str, device: str, deadline_s: float) -> Result:
    """Run one stage in its own process. Resumes a stopped stage if the code is unchanged."""
    tell(f"{stage.name}: {stage.measures} (at most {deadline_s:.0f} s)")
    kept, log = given.out / f"{stage.name}.json", given.out / f"{stage.name}.log"
    of = {"code": code, "device": device}
    left = _read(kept)
    if given.again or {name: left.get(name) for name in of} != of:
        kept.write_text(json.dumps(of), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu", "--run", stage.name, "--out", str(given.out)]
    card = WatchedCard()
    began_at = time.monotonic()
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [*command, "--stand-in"] if given.stand_in else command,
            stdout=said, stderr=subprocess.STDOUT, cwd=PROJECT, env=_environment(given), start_new_session=True,
        )  # fmt: skip
        error = _end_of(process, deadline_s, card)
    seconds = time.monotonic() - began_at
    left = _read(kept)
    if error is None:
        kept.unlink(missing_ok=True)  # another pass starts anew
    else:
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
        figures=left.get("figures", {}),
        tables=left.get("tables", {}),
        card={} if given.stand_in else card.seen(),
    )


def _end_of(process: subprocess.Popen[bytes], deadline_s: float, card: WatchedCard) -> str | None:
    """Wait for a stage; return None if it ended without an error. Kills the stage's whole process group."""
    ends_at = time.monotonic() + deadline_s
    try:
        while (left_s := ends_at - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(min(left_s, _LOOK_EVERY_S))
                return None if status == 0 else f"ended with status {status}"
            card.look()
        return f"stopped after {deadline_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run(stage: Stage, given: argparse.Namespace) -> int:
    """Run a stage in this process, which is the stage's own."""
    import torch

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.graphs import standing_in

    torch.set_num_threads(min(torch.get_num_threads(), 16))
    bench = Bench(
        out=given.out,
        file=given.out / f"{stage.name}.json",
        stands_in=given.stand_in,
        earlier=_read(given.out / _EARLIER),
        stage=stage.name,
    )
    module = importlib.import_module(stage.module)
    with standing_in(given.stand_in):
        module.measure(bench)
    return 0


def _environment(given: argparse.Namespace) -> Mapping[str, str]:
    """Return the environment of a stage. Compiled kernels stay in the folder for the next call."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    caches = {"TRITON_CACHE_DIR": str(given.out / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(given.out / "inductor")}
    on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment() | offline | caches | (on_cpu if given.stand_in else {})


def _device() -> str:
    """Return the card's name. Raises BenchmarkError if there is no card.

    A separate process asks, because CUDA in this process would take memory from the stages.
    """
    done = subprocess.run([sys.executable, "-c", _ASK_DEVICE], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    why = done.stderr.strip().rpartition("\n")[2].removeprefix("AssertionError: ")
    raise BenchmarkError(
        f"stages need a GPU: {why}. With --stand-in every stage runs on a CPU: this tests the code but measures nothing"
    )


def _write_earlier(out: Path, results: Mapping[str, Sequence[Result]]) -> None:
    """Write the figures of earlier stages, which a stage may look up."""
    figures = {name: summed_up(each).figures for name, each in results.items()}
    (out / _EARLIER).write_text(json.dumps(figures), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _named(names: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages with these names. Raises BenchmarkError if there is no such stage."""
    known = {stage.name: stage for stage in STAGES}
    for name in names:
        if name not in known:
            raise BenchmarkError(f"there is no stage {name!r}{did_you_mean(name, known)}")
    return tuple(stage for stage in STAGES if stage.name in names)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for results, logs and table")
    parser.add_argument(
        "--stages", nargs="+", metavar="STAGE", help=f"run only these; all: {', '.join(stage.name for stage in STAGES)}"
    )
    parser.add_argument(
        "--first-contact",
        action="store_true",
        help="run only the stage contact: does each backend work here?",
    )
    parser.add_argument(
        "--budget-s", type=float, default=3600.0, metavar="S", help="no stage starts that needs more than is left"
    )
    parser.add_argument(
        "--slow", type=above_zero, default=1.0, metavar="TIMES", help="factor on all times of stages, for a slower card"
    )
    parser.add_argument("--keep", action="store_true", help="also count results of changed files; the table marks them")
    parser.add_argument("--again", action="store_true", help="also run stages that have a result")
    parser.add_argument("--stand-in", action="store_true", help="run on a CPU; the figures are no claims")
    parser.add_argument("--run", metavar="STAGE", help=argparse.SUPPRESS)  # internal: run the stage in this process
    return parser


if __name__ == "__main__":
    sys.exit(main())
