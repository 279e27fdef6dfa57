"""The folder of a bulk run, with its description, its results while it is running, and its output at the end.

    run.json       the input's fingerprint and everything else that the answers depend on
    ...            the files of the result store while the run is unfinished, see `app/jobs/results.py`
    results.jsonl  the output, made from the store (or results.parquet)
    summary.json   written last; if it exists, the run is finished

A lock, which the system releases when a process exits, ensures that one process at a time uses the folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.disk import hidden_name, take_lock, write_atomically
from app.errors import Failure, InvalidSetup
from app.jobs.job import Counts
from app.jobs.outputs import write_records
from app.jobs.results import ResultStore, ResultsUnwritable
from app.jobs.runner import JobRun

MANIFEST, SUMMARY = "run.json", "summary.json"
OUTPUTS = {"jsonl": "results.jsonl", "parquet": "results.parquet"}
FORMAT_VERSION = 2  # the version of the store's files; increase it whenever their format changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The content of summary.json. Counts cover all runs on the folder; times and rates cover only the last one."""

    rows: int
    ok: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float  # from the first engine's readiness to the last record, in the last run
    rows_per_s: float
    tokens_per_s: float  # generated tokens
    runs: int
    engines_lost: int
    continued_rows: int
    recomputed_rows: int

    def __str__(self) -> str:
        lines = [
            f"{self.rows:,} rows: {self.ok:,} ok, {self.failed:,} failed",
            f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} generated; "
            f"{self.rows_per_s:,.1f} rows/s, {self.tokens_per_s:,.0f} tokens/s in {self.seconds:,.1f} s",
        ]
        if self.engines_lost or self.runs > 1 or self.recomputed_rows:
            lines.append(
                f"{self.runs:,} runs, {self.engines_lost:,} engines lost; {self.continued_rows:,} rows resumed, "
                f"{self.recomputed_rows:,} rows restarted ({self.recomputed_rows / self.rows:.2%})"
            )
        return "\n".join(lines)


class RunFolder:
    """The folder of one run, locked by this process."""

    def __init__(self, path: Path, *, num_items: int, output_format: str, lock: int) -> None:
        """Use `open_run` instead, which checks and locks the folder first. `lock` is the lock's file descriptor."""
        self._path = path
        self._format = output_format
        self._lock = lock
        self.results = ResultStore(path, num_items)

    def close(self) -> None:
        """Release the folder. An unfinished run can be resumed later."""
        self.results.close()
        os.close(self._lock)

    def finish(self, summary: Summary) -> None:
        """Write the output, then the summary, and delete the store. Raises ResultsUnwritable."""
        assert self.results.is_complete, "a run is finished when every item has its result"
        self.results.sync()
        try:
            write_records(self.results, self._path / OUTPUTS[self._format], self._format)
            _write_json(self._path / SUMMARY, asdict(summary))
            self.results.delete()
        except OSError as error:
            raise ResultsUnwritable(*error.args) from error

    def unwritable(self, error: OSError) -> Failure:
        """Return an error that reports why the folder cannot be written, and how to resume the run."""
        results = self.results
        return Failure(
            f"{self._path} cannot be written to: {error.strerror}; {len(results.ended):,} of {results.num_items:,} "
            f"rows are stored there. Free some space, or remove the cause, and resume with --resume"
        )


def open_run(path: Path, *, run: Mapping[str, Any], num_items: int, output_format: str, resume: bool) -> RunFolder:
    """Open or create the folder for the run that `run` describes. If it is rejected, it is not changed.

    Raises:
        InvalidSetup: the folder is in use, contains other files, another run or a finished run, or contains this run
            unfinished and `resume` is false.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
        if lock is None:
            raise InvalidSetup(f"--output {path}: another process is using this folder; wait until it ends")
        try:
            if (path / MANIFEST).exists():
                _check_can_resume(path, run, resume=resume)
            else:
                _check_is_empty(path)
                _write_json(path / MANIFEST, {"version": FORMAT_VERSION} | dict(run))
            return RunFolder(path, num_items=num_items, output_format=output_format, lock=lock)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise InvalidSetup(f"--output {path} cannot be used: {error.strerror}") from error


def finish_run(folder: RunFolder, run: JobRun[Any], compute: Callable[[], None]) -> Summary:
    """Call `compute` unless every item has ended, then finish the folder. Returns the summary.

    Raises Failure if the folder cannot be written, and the errors of `compute`.
    """
    counts = folder.results.counts
    before = replace(counts)
    try:
        if not folder.results.is_complete:
            compute()
        summary = _summary(folder.results, run, before)
        folder.finish(summary)
    except ResultsUnwritable as error:
        raise folder.unwritable(error) from error
    return summary


def _summary(results: ResultStore, run: JobRun[Any], before: Counts) -> Summary:
    counts, recovery = results.counts, results.recovery
    ended_at = run.ended_at or time.monotonic()
    seconds = max(ended_at - (run.began_at or ended_at), 1e-9)  # near 0 if nothing was computed
    return Summary(
        rows=counts.num_items,
        ok=counts.num_items - counts.num_failed,
        failed=counts.num_failed,
        prompt_tokens=counts.num_input_tokens,
        completion_tokens=counts.num_output_tokens,
        seconds=round(seconds, 3),
        rows_per_s=round((counts.num_items - before.num_items) / seconds, 2),
        tokens_per_s=round((counts.num_output_tokens - before.num_output_tokens) / seconds, 2),
        runs=recovery.runs,
        engines_lost=recovery.engines_lost,
        continued_rows=recovery.continued_items,
        recomputed_rows=recovery.recomputed_items,
    )


def finished_summary(path: Path, run: Mapping[str, Any]) -> Summary | None:
    """Return the summary if the folder contains this run and the run is finished, otherwise None."""
    if not (path / SUMMARY).exists() or _read_json(path / MANIFEST) != {"version": FORMAT_VERSION} | dict(run):
        return None
    return Summary(**_read_json(path / SUMMARY))


def _check_can_resume(path: Path, run: Mapping[str, Any], *, resume: bool) -> None:
    there = _read_json(path / MANIFEST)
    version = there.pop("version", 1)
    if version != FORMAT_VERSION:
        raise InvalidSetup(
            f"--output {path} contains a run with files of version {version}, but this Carousel uses {FORMAT_VERSION}; "
            f"use another folder, or finish that run with the version that started it"
        )
    differing = sorted(name for name in run.keys() | there.keys() if there.get(name) != run.get(name))
    if differing:
        named = "; ".join(f"{name}: {there.get(name)!r} there, {run.get(name)!r} now" for name in differing[:4])
        raise InvalidSetup(f"--output {path} contains another run ({named[:600]}); use another folder")
    if (path / SUMMARY).exists():
        raise InvalidSetup(f"--output {path}: this run is finished (see {path / SUMMARY}); use another folder")
    if not resume:
        raise InvalidSetup(
            f"--output {path} contains this run, which is unfinished; resume with --resume, or use another folder"
        )


def _check_is_empty(path: Path) -> None:
    strangers = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if set(strangers) - {hidden_name(MANIFEST)}:  # a process that died at startup may have left the hidden manifest
        raise InvalidSetup(f"--output {path} contains {', '.join(strangers[:3])} but no run; use an empty folder")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidSetup(f"{path} is not valid JSON: {error}; use another folder") from error
    return dict(content)
