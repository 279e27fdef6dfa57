"""Repeat a recorded run, and explain the first step that differs.

    python -m benchmarks.engine.replay LOG [--model DIR | --simulated] [--set PATH=VALUE ...] [--json OUT]

LOG is a folder that `engine.step_log.path` named, or a file in that folder. Arrivals, aborts and retunings come before
the recorded steps, and the clock returns the recorded times. The model is the log's model unless another one is given.
Requests use the adapters that the log names, with unchanged files. `--simulated` draws the recorded tokens without a
model and so tests only the decisions. Exit status: 0 the same, 1 diverged, 2 unreadable log or changed adapter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from app.build import build_matchers, build_sync_engine
from app.config import EngineConfig, SpeculationConfig
from app.engine.engine import NO_ADAPTERS, Engine
from app.engine.request import Adapter
from app.engine.trace.entries import Arrival, DroppedEntries, Entry, Header, StepRecord, parse, without_batch_size
from app.errors import CarouselError, UnsupportedAdapter
from app.model.adapter_files import adapter_at
from app.versions import commit, versions
from benchmarks.engine.divergence import Comparison, Divergence, differences_between
from benchmarks.engine.reenacting_runner import StandIns
from benchmarks.engine.reenactment import Reenactment, Shares, facts_of
from benchmarks.harness.command import BenchmarkError, command_parser, refused, tell
from benchmarks.harness.settings import engine_config, parse_assignments

_TELL_EVERY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a replay."""

    run: str
    num_requests: int
    num_steps: int  # steps compared
    divergence: Divergence | None
    differences: list[str]  # of the set-up
    notes: list[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """The number of equal steps, and how the replay ended."""

    num_steps: int
    divergence: Divergence | None = None
    num_lost: int = 0  # entries missing after those steps


@dataclass(slots=True)
class RecordedRun:
    """The files of a run's log. The entries are read on demand, because a log may be larger than memory."""

    header: Header
    files: tuple[Path, ...]
    notes: list[str] = field(default_factory=list)  # oddities of the files, in words

    @property
    def hides_prompts(self) -> bool:
        return not self.header.config["step_log"]["record_prompts"]

    def entries(self) -> Iterator[Entry]:
        """Yield all entries. A last line that a crash has cut is left out, with a note.

        Raises:
            BenchmarkError: a file cannot be read, or a line of it is wrong.
        """
        for file in self.files:
            yield from self._entries_of(file, is_last=file == self.files[-1])

    def _entries_of(self, path: Path, *, is_last: bool) -> Iterator[Entry]:
        with _opened(path) as file:
            next(file)  # the header
            for number, line in enumerate(file, start=2):
                try:
                    yield parse(line.decode())
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    if is_last and not line.endswith(b"\n"):
                        self._note(f"{path.name}: the last line is cut (a crash?) and left out")
                        return
                    raise BenchmarkError(f"{path}:{number}: this is no entry of a step log: {error}") from error

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.replay", __doc__)
    parser.add_argument("log", metavar="LOG", help="folder or file of a step log")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="compute with this model instead of the log's")
    source.add_argument("--simulated", action="store_true", help="without a model: the recorded tokens are drawn")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="PATH=VALUE", help="change a setting")
    parser.add_argument("--json", metavar="FILE", help="write the outcome to this file, as JSON")
    given = parser.parse_args(arguments)
    try:
        outcome = replay(given.log, model=given.model, simulated=given.simulated, settings=given.set)
        if given.json is not None:
            Path(given.json).write_text(json.dumps(asdict(outcome)) + "\n", encoding="utf-8")
    except (BenchmarkError, CarouselError, OSError) as error:
        return refused(error)
    print(in_words(outcome), flush=True)
    return 0 if outcome.divergence is None else 1


def replay(log: str, *, model: str | None = None, simulated: bool = False, settings: Sequence[str] = ()) -> Outcome:
    """Run a log again up to its end or the first difference.

    Raises:
        BenchmarkError: the log cannot be read or re-executed, a setting is wrong, or an adapter has changed.
        CarouselError: the model cannot be loaded.
    """
    started = time.perf_counter()
    run = find_run(log)
    if run.hides_prompts and not simulated:
        raise BenchmarkError("the log has no prompts (step_log.record_prompts was false): replay it with --simulated")
    config = _configured(run.header, model, settings)
    differences = _differences(run.header, config, computes=not simulated)
    engine = None if simulated else _engine_of(config, run)
    matchers = None if simulated else build_matchers(config, facts_of(run.header))
    reenactment = Reenactment(
        run.header,
        scheduler=config.scheduler,
        cache=config.cache,
        model=None if engine is None else engine.runner,
        adapters=None if engine is None else engine.adapters,
        matchers=matchers,
        stand_ins=StandIns(run.entries(), block_size=config.cache.block_size) if run.hides_prompts else None,
    )
    comparison = Comparison(
        reenactment.request_ids,
        differences=differences,
        computes=not simulated,
        hides_tokens=run.hides_prompts,
        had_batch_size="batch_size" in run.header.config["scheduler"]["strategy"],
    )
    found = reenact(run.entries(), reenactment, comparison)
    if matchers is not None:
        matchers.close()
    if found.num_lost:
        run.notes.append(
            f"{found.num_lost:,} entries were dropped after step {found.num_steps} because the disk was too slow: "
            f"no later step can be replayed"
        )
    return Outcome(
        run=run.header.run,
        num_requests=len(reenactment.request_ids),
        num_steps=found.num_steps,
        divergence=found.divergence,
        differences=differences,
        notes=run.notes,
        seconds=round(time.perf_counter() - started, 3),
    )


def reenact(entries: Iterable[Entry], reenactment: Reenactment, comparison: Comparison) -> Found:
    """Repeat the entries up to their end, a gap in the log or the first difference."""
    num_steps, shares = 0, Shares()
    for entry, after in _with_next_steps(entries):
        if isinstance(entry, DroppedEntries):
            return Found(num_steps, num_lost=entry.num_entries)
        if isinstance(entry, StepRecord):
            recorded = shares.in_full(entry)
            divergence = comparison.first_difference(recorded, reenactment.step(recorded, after))
            if divergence is not None:
                return Found(num_steps, divergence)
            num_steps += 1
            if num_steps % _TELL_EVERY == 0:
                tell(f"{num_steps:,} steps are the same")
            continue
        reenactment.outside(entry)
    return Found(num_steps)


def _with_next_steps(entries: Iterable[Entry]) -> Iterator[tuple[Entry, StepRecord | None]]:
    """Yield each entry with the step after it."""
    held: list[Entry] = []
    for entry in entries:
        if isinstance(entry, StepRecord):
            yield from zip(held, repeat(entry))
            held.clear()
        held.append(entry)
    yield from zip(held, repeat(None))


def in_words(outcome: Outcome) -> str:
    """Return the outcome as text for people."""
    lines = [*(f"note: {note}" for note in outcome.notes)]
    if outcome.divergence is None:
        lines.append(f"the same: {outcome.num_steps:,} steps, {outcome.num_requests:,} requests")
        lines += [f"  although {difference}" for difference in outcome.differences]
    else:
        lines += [f"{outcome.num_steps:,} steps are the same", str(outcome.divergence)]
    return "\n".join(lines)


def _configured(header: Header, model: str | None, settings: Sequence[str]) -> EngineConfig:
    """Return the log's settings with the given changes. The replay records no log of its own."""
    assignments = parse_assignments(settings)
    base = dict(header.config) | {"step_log": {}}
    base["model"] = header.config["model"] | ({} if model is None else {"path": model})
    base["cache"] = _cache_of(header)
    base["scheduler"] = without_batch_size(header.config["scheduler"])
    for name in ("strategy", "policy"):
        if f"scheduler.{name}" in assignments:  # another strategy or policy starts with its own defaults
            base["scheduler"] = base["scheduler"] | {name: {}}
    try:
        return engine_config(base | dict(assignments))
    except (ValidationError, KeyError, TypeError) as error:
        raise BenchmarkError(f"the log's settings are not valid in this version: {error}") from error


def _cache_of(header: Header) -> dict[str, Any]:
    """Return the settings with the recorded number of blocks, and without tiers: the log has the blocks from tiers."""
    cache: dict[str, Any] = header.config["cache"] | {"num_blocks": header.num_blocks or None, "tiers": []}
    return cache


def _differences(header: Header, config: EngineConfig, *, computes: bool) -> list[str]:
    here = config.model_dump(mode="json")
    recorded = {**header.config, "cache": _cache_of(header)}
    recorded["scheduler"] = without_batch_size(header.config["scheduler"])
    branches = ("scheduler", "cache", *(("model",) if computes else ()))
    found = [
        difference
        for branch in branches
        for difference in differences_between(recorded[branch], here[branch], f"{branch}.")
    ]
    if header.commit != commit():
        found.append(f"commit: {header.commit} in the log, {commit()} here")
    if computes:
        found += differences_between(header.versions, versions())
    return found


def _engine_of(config: EngineConfig, run: RecordedRun) -> Engine:
    """Return an engine with the model and the recorded number of blocks that can load the adapters of the run."""
    adapters = {entry.request.adapter for entry in run.entries() if isinstance(entry, Arrival)} - {None}
    for adapter in adapters:
        assert adapter is not None, "taken out above"
        _check_adapter(adapter)
    tell(f"loading {config.model.path}")
    # The log has the drafts.
    config = config.model_copy(update={"speculation": SpeculationConfig()})
    engine = build_sync_engine(config, keeps_all=not facts_of(run.header).num_window_groups)
    if adapters and engine.adapters is None:
        raise BenchmarkError(f"the log has requests with adapters; {NO_ADAPTERS}")
    return engine


def _check_adapter(recorded: Adapter) -> None:
    try:
        found = adapter_at(recorded.name, recorded.path)
    except UnsupportedAdapter as error:
        raise BenchmarkError(f"the log has requests with the adapter {recorded.name}: {error.message}") from error
    if found.digest != recorded.digest:
        raise BenchmarkError(
            f"the adapter {recorded.name} in {recorded.path} is {found.digest} here and {recorded.digest} in the log: "
            f"restore the files of the run, or replay with --simulated"
        )


def find_run(place: str) -> RecordedRun:
    """Return the run that a file belongs to, or the only run in a folder.

    Raises:
        BenchmarkError: there is no run, there are several, or the first part of the run is missing.
    """
    path = Path(place)
    if path.is_dir():
        path = _only_run_in(path)
    siblings = sorted(path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.jsonl")) if "-" in path.stem else []
    files = tuple(siblings) if path in siblings else (path,)
    headers = [_header_of(file) for file in files]
    for expected, (file, header) in enumerate(zip(files, headers, strict=True), start=1):
        if header.part != expected:
            raise BenchmarkError(
                f"{file} is part {header.part} of its log and part {expected} is not there; an engine can only be run "
                f"again from its start"
            )
        if header.run != headers[0].run:
            raise BenchmarkError(f"{file} is of run {header.run}, {files[0]} of run {headers[0].run}")
    return RecordedRun(headers[0], files)


def _only_run_in(folder: Path) -> Path:
    first_files = {path.stem.rpartition("-")[0]: path for path in sorted(folder.glob("steps-*.jsonl"), reverse=True)}
    if len(first_files) == 1:
        return next(iter(first_files.values()))
    found = ", ".join(path.name for path in sorted(first_files.values())[-8:]) or "no steps-*.jsonl"
    raise BenchmarkError(f"{folder} holds {len(first_files)} runs: name a file of one run ({found})")


def _header_of(path: Path) -> Header:
    with _opened(path) as file:
        line = file.readline()
    try:
        return Header.parse(line.decode())
    except (ValueError, TypeError) as error:
        raise BenchmarkError(f"{path}: {error}") from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise BenchmarkError(f"the step log {path} cannot be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
