"""Writes what came of a batch's lines into its output file and its error file. Blocks: call it in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from app.jobs.catalog import Store
from app.jobs.files import FileDraft, FileFolder
from app.jobs.items import InputRules, read_lines
from app.jobs.job import Batch, Status
from app.jobs.line import InputLine, unfinished_line

_WHY_UNFINISHED = {
    Status.CANCELLED: ("batch_cancelled", "the batch was cancelled before this line was done"),
    Status.EXPIRED: ("batch_expired", "the batch's time was over before this line was done"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A kept file that the store does not know yet."""

    id: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Both files of a batch; none where there are no lines for it."""

    output: WrittenFile | None
    errors: WrittenFile | None


def write_files(batch: Batch, end: Status, store: Store, folder: FileFolder, rules: InputRules) -> Written:
    """Write every line of a batch that is about to `end`: into one of both files, once."""
    with ExitStack() as stack:
        output, errors = (stack.enter_context(folder.draft()) for _ in range(2))
        ended: set[int] = set()
        for number, is_error, text in store.results(batch.id):
            ended.add(number)
            (errors if is_error else output).write(text.encode() + b"\n")
        if end in _WHY_UNFINISHED and batch.in_progress_at is not None:
            code, message = _WHY_UNFINISHED[end]
            for line in _unfinished(batch, folder, rules, ended):
                errors.write(unfinished_line(line, code, message).encode() + b"\n")
        return Written(output=_kept(output), errors=_kept(errors))


def _unfinished(batch: Batch, folder: FileFolder, rules: InputRules, ended: set[int]) -> Iterator[InputLine]:
    with closing(read_lines(partial(folder.open, batch.input_file_id), rules)) as lines:
        for line in lines:
            assert isinstance(line, InputLine), "a batch in progress has a valid input file"
            if line.number not in ended:
                yield line


def _kept(draft: FileDraft) -> WrittenFile | None:
    if not draft.num_bytes:
        return None
    draft.keep()
    return WrittenFile(id=draft.id, num_bytes=draft.num_bytes)
