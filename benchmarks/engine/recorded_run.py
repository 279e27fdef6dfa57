"""A step log read back: the files of one run, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from app.engine.trace.entries import Entry, Header, parse
from benchmarks.harness.command import BenchmarkError


@dataclass(slots=True)
class RecordedRun:
    """Where a run's log lies. Its entries are read when they are asked for: a log may be larger than memory."""

    header: Header
    files: tuple[Path, ...]
    notes: list[str] = field(default_factory=list)  # what was odd about the files, in words

    @property
    def hides_prompts(self) -> bool:
        return not self.header.config["step_log"]["record_prompts"]

    def entries(self) -> Iterator[Entry]:
        """All entries; a last line that a crash has cut is left out, with a note.

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


def find_run(place: str) -> RecordedRun:
    """The run that a file belongs to, or the only one in a folder.

    Raises:
        BenchmarkError: there is none, there are several, or its beginning is missing.
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
                f"again from its start: keep more of the log with step_log.max_megabytes"
            )
        if header.run != headers[0].run:
            raise BenchmarkError(f"{file} is of run {header.run}, {files[0]} of run {headers[0].run}")
    return RecordedRun(headers[0], files)


def _only_run_in(folder: Path) -> Path:
    first_files = {path.stem.rpartition("-")[0]: path for path in sorted(folder.glob("steps-*.jsonl"), reverse=True)}
    if len(first_files) == 1:
        return next(iter(first_files.values()))
    found = ", ".join(path.name for path in sorted(first_files.values())[-8:]) or "no steps-*.jsonl"
    raise BenchmarkError(f"{folder} holds {len(first_files)} runs: name a file of the one that is meant ({found})")


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
