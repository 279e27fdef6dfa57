from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from app.errors import InvalidSetup
from app.jobs.progress import Summary
from app.jobs.record import COLUMNS, Record
from app.jobs.results import JOURNAL, MANIFEST, SUMMARY, OutputFolder, finished_summary, open_folder

RUN = {"model": "models/demo", "fingerprint": "abc"}
SUMMARY_FIELDS: dict[str, Any] = {
    "rows": 4, "ok": 4, "failed": 0, "prompt_tokens": 0, "completion_tokens": 0, "seconds": 1.0, "rows_per_s": 4.0,
    "tokens_per_s": 0.0, "runs": 1, "engines_lost": 0, "continued_rows": 0,
    "recomputed_rows": 0,
}  # fmt: skip


def record(row: int, **fields: Any) -> Record:
    return Record(row=row, id=f"row-{row}", **({"text": f"text ü {row}\n"} | fields))


@contextmanager
def opened(path: Path, *, num_rows: int = 4, resume: bool = False, **changes: Any) -> Iterator[OutputFolder]:
    settings = {"run": RUN, "output_format": "jsonl"} | changes
    with closing(open_folder(path, num_rows=num_rows, resume=resume, **settings)) as folder:
        yield folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_is_resumed_has_what_was_appended_before(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as folder:
        folder.append([record(2, completion_tokens=5), record(0, text=None, error="no")])
    with opened(tmp_path / "out", resume=True) as folder:
        assert [row in folder.settled for row in range(4)] == [True, False, True, False]
        assert (folder.counts.rows, folder.counts.failed, folder.counts.completion_tokens) == (2, 1, 5)
        assert folder.recovery.runs == 2


def test_a_row_is_written_once_however_often_it_comes(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as folder:
        folder.append([record(1), record(1)])
        folder.append([record(1), record(2)])
    assert [line["row"] for line in lines(tmp_path / "out" / JOURNAL)] == [1, 2]


@pytest.mark.parametrize(
    "torn", [b'{"row": 3, "id"', b"\0\0\0\n", b'{"row": 99, "id": "x"}\n', b'{"row": 1, "id": "x"}\n']
)
def test_a_torn_end_is_cut_off_and_its_rows_are_open_again(tmp_path: Path, torn: bytes) -> None:
    with opened(tmp_path / "out") as folder:
        folder.append([record(0), record(1)])
    with (tmp_path / "out" / JOURNAL).open("ab") as journal:
        journal.write(torn)
    with opened(tmp_path / "out", resume=True) as folder:
        assert len(folder.settled) == 2
        folder.append([record(3)])
    assert [line["row"] for line in lines(tmp_path / "out" / JOURNAL)] == [0, 1, 3]


def test_cut_anywhere_the_journal_gives_the_whole_records_before_the_cut(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as folder:
        folder.append([record(row) for row in range(4)])
    content = (tmp_path / "out" / JOURNAL).read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "out" / JOURNAL).write_bytes(content[:length])
        with opened(tmp_path / "out", resume=True) as folder:
            assert len(folder.settled) == content[:length].count(b"\n")


def test_rows_that_were_begun_and_not_settled_begin_again_or_go_on_where_their_tokens_are_known(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as folder:
        folder.begun.update([0, 1, 2, 3])
        folder.progress({1: (7, 8), 2: (9,)})
        folder.append([record(1)])
    with opened(tmp_path / "out", resume=True) as folder:
        assert (folder.recovery.continued_rows, folder.recovery.recomputed_rows) == (1, 2)
        assert [row in folder.under_way for row in range(4)] == [False, False, True, False]


def test_what_interruptions_cost_outlives_the_process(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as folder:
        folder.recovery.engines_lost += 1
        folder.note_interrupted([0, 3])
        folder.sync()
    with opened(tmp_path / "out", resume=True) as folder:
        assert (folder.recovery.engines_lost, folder.recovery.recomputed_rows, folder.recovery.runs) == (1, 2, 2)


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_finished_run_leaves_its_results_and_its_summary(tmp_path: Path, output_format: str) -> None:
    with opened(tmp_path / "out", output_format=output_format) as folder:
        folder.append([record(row) for row in (2, 0, 3)] + [record(1, text=None, error="no")])
        folder.finish(SUMMARY_FIELDS)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([f"results.{output_format}", MANIFEST, SUMMARY])
    if output_format == "parquet":
        table = parquet.read_table(tmp_path / "out" / "results.parquet")
        assert tuple(table.column_names) == COLUMNS
        results = table.to_pylist()
    else:
        results = lines(tmp_path / "out" / "results.jsonl")
    assert [(row["row"], row["text"], row["error"]) for row in results] == [
        (2, "text ü 2\n", None), (0, "text ü 0\n", None), (3, "text ü 3\n", None), (1, None, "no"),
    ]  # fmt: skip
    assert finished_summary(tmp_path / "out", RUN) == Summary(**SUMMARY_FIELDS)
    assert finished_summary(tmp_path / "out", RUN | {"model": "other"}) is None


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_death_before_the_summary_is_made_good(tmp_path: Path, output_format: str) -> None:
    with opened(tmp_path / "out", output_format=output_format) as folder:
        folder.append([record(row) for row in range(4)])
        journal = (tmp_path / "out" / JOURNAL).read_bytes()
        folder.finish(SUMMARY_FIELDS)
    (tmp_path / "out" / SUMMARY).unlink()
    if output_format == "parquet":  # its journal goes after the summary has come
        (tmp_path / "out" / JOURNAL).write_bytes(journal)
    with opened(tmp_path / "out", output_format=output_format, resume=True) as folder:
        assert len(folder.settled) == 4
        folder.finish(SUMMARY_FIELDS)
    assert finished_summary(tmp_path / "out", RUN) is not None


def refusal(path: Path, **changes: Any) -> str:
    before = {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}
    with pytest.raises(InvalidSetup) as refused, opened(path, **changes):
        pass
    assert {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()} == before
    return refused.value.message


def test_a_folder_with_anything_else_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path / "unfinished") as folder:
        folder.append([record(0)])
    with opened(tmp_path / "finished") as folder:
        folder.append([record(row) for row in range(4)])
        folder.finish(SUMMARY_FIELDS)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("mine")
    (tmp_path / "a_file").write_text("mine")
    assert "go on with --resume" in refusal(tmp_path / "unfinished")
    other = refusal(tmp_path / "unfinished", run=RUN | {"model": "large"}, resume=True)
    assert "another run (model: 'models/demo' there, 'large' now)" in other
    assert "this run is finished" in refusal(tmp_path / "finished", resume=True)
    assert "holds thesis.txt and no run" in refusal(tmp_path / "theirs", resume=True)
    assert "cannot be used" in refusal(tmp_path / "a_file")
    assert "cannot be used" in refusal(tmp_path / "a_file" / "below")


def test_two_processes_cannot_have_it_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "out"):
        assert "another process is at work" in refusal(tmp_path / "out", resume=True)


FULL_DISK = """
import resource, sys
from pathlib import Path
from app.jobs.results import open_folder
from app.jobs.record import Record
from app.errors import Failure
folder = open_folder(Path(sys.argv[1]), run={}, num_rows=100, output_format="jsonl", resume=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    for row in range(100):
        folder.append([Record(row=row, id=str(row), text="x" * 100)])
except Failure as error:
    print(len(folder.settled), error.message)
"""


def test_a_full_disk_fails_cleanly_and_keeps_what_was_written(tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: to whoever writes it is the same, some bytes fit and then none."""
    project = Path(__file__).parents[2]
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "out")]
    printed = subprocess.run(command, check=True, cwd=project, timeout=60, capture_output=True, text=True).stdout
    num_settled, _, message = printed.partition(" ")
    assert 5 < int(num_settled) < 30
    assert f"{num_settled} of 100 rows are safe there" in message
    with opened(tmp_path / "out", run={}, num_rows=100, resume=True) as folder:
        assert len(folder.settled) == int(num_settled)
