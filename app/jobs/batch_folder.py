"""A batch on its way through bulk runs: a folder with one part for each model that its lines name.

    <batch id>/0/model.json    the model's name
    <batch id>/0/input.jsonl   the lines that are to be computed, as rows; their ids name their lines
    <batch id>/0/out/          the run's own folder, see `app/jobs/results.py`

A folder has its name once it is whole: one that a crash has left in the making is made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from app.api import AcceptedItem
from app.disk import sync_folder
from app.jobs.job_server import INPUT, OUTPUT
from app.jobs.record import Record
from app.jobs.results import SUMMARY, written_lines

_MODEL = "model.json"
_MAKING = ".making"
_PIECE_BYTES = 1024 * 1024  # of records at once


@dataclass(frozen=True, slots=True)
class Part:
    """The lines of a batch that one model answers."""

    number: int
    folder: Path
    model: str

    @property
    def is_finished(self) -> bool:
        """Whether every row has its record."""
        return (self.folder / OUTPUT / SUMMARY).exists()

    def row_ids(self) -> Iterator[str]:
        """Of all rows."""
        with (self.folder / INPUT).open("rb") as rows:
            for row in rows:
                yield json.loads(row)["custom_id"]


def parts_of(folder: Path) -> list[Part] | None:
    """The parts of a batch's folder, in order; None when there is none that is whole."""
    if not folder.exists():
        return None
    numbers = sorted(int(each.name) for each in folder.iterdir())
    return [Part(number, at := folder / str(number), json.loads((at / _MODEL).read_bytes())) for number in numbers]


class FolderDraft:
    """A batch's folder in the making."""

    def __init__(self, folder: Path) -> None:
        """Begin it, anew if there was one."""
        self._folder = folder
        self._draft = folder.with_name(folder.name + _MAKING)
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(mode=0o700, parents=True)
        self._files: dict[str, BinaryIO] = {}  # by model

    def __enter__(self) -> FolderDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def write(self, url: str, rows: Iterable[tuple[str, AcceptedItem]]) -> None:
        """Add rows by their ids, each to its model's part."""
        for row_id, accepted in rows:
            row = {"custom_id": row_id, "method": "POST", "url": url, "body": accepted.body}
            self._file(accepted.model).write(json.dumps(row).encode() + b"\n")

    def keep(self) -> None:
        """Give it its name; from here on it survives a crash of the machine."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        for part in self._draft.iterdir():
            sync_folder(part)
        sync_folder(self._draft)
        self._draft.replace(self._folder)
        sync_folder(self._folder.parent)

    def _file(self, model: str) -> BinaryIO:
        if model not in self._files:
            part = self._draft / str(len(self._files))
            part.mkdir()
            (part / _MODEL).write_text(json.dumps(model), encoding="utf-8")
            self._files[model] = (part / INPUT).open("wb")
        return self._files[model]


def delete_folder(folder: Path) -> None:
    """Remove a batch's folder, whole or in the making."""
    for each in (folder, folder.with_name(folder.name + _MAKING)):
        shutil.rmtree(each, ignore_errors=True)


def delete_all_but(folder: Path, kept: Sequence[str]) -> None:
    """Remove the folders of all other batches, and what is in the making."""
    if folder.exists():
        for each in folder.iterdir():
            if each.name not in kept:
                shutil.rmtree(each, ignore_errors=True)


class Records:
    """Reads the records of a part's run, from their beginning on, as far as they are written."""

    def __init__(self, part: Part) -> None:
        self._folder = part.folder / OUTPUT
        self._offset = 0

    def more(self) -> list[Record]:
        """The next of them; none when there are no others now. Blocks: call it in a thread."""
        content = written_lines(self._folder, self._offset, _PIECE_BYTES)
        try:
            records = [Record(**json.loads(line)) for line in content.splitlines()]
        except (ValueError, TypeError):  # a run that failed while it wrote has taken records back, others are there now
            self._offset = 0
            return []
        self._offset += len(content)
        return records
