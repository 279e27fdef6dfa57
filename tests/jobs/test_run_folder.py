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
from app.jobs.job import ItemOutput, ItemResult
from app.jobs.outputs import COLUMNS, RecordFormat
from app.jobs.results import ResultsUnwritable
from app.jobs.run_folder import MANIFEST, SUMMARY, RunFolder, Summary, finished_summary, open_run

RUN = {"model": "models/demo", "fingerprint": "abc"}
SUMMARY_OF_FOUR = Summary(
    rows=4, ok=4, failed=0, prompt_tokens=0, completion_tokens=0, seconds=1.0, rows_per_s=4.0, tokens_per_s=0.0, runs=1,
    engines_lost=0, continued_rows=0, recomputed_rows=0,
)  # fmt: skip


def record(row: int, **fields: Any) -> ItemResult:
    output = ItemOutput(number=row, id=f"row-{row}", **({"text": f"text ü {row}\n"} | fields))
    return RecordFormat().generated(output)


@contextmanager
def opened(path: Path, *, num_rows: int = 4, resume: bool = False, **changes: Any) -> Iterator[RunFolder]:
    settings = {"run": RUN, "output_format": "jsonl"} | changes
    with closing(open_run(path, num_items=num_rows, resume=resume, **settings)) as folder:
        yield folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_is_resumed_has_what_was_appended_before(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as folder:
        folder.results.append([record(2, completion_tokens=5), record(0, text=None, error="no")])
    with opened(tmp_path / "out", resume=True) as folder:
        counts = folder.results.counts
        assert (counts.num_items, counts.num_failed, counts.num_output_tokens) == (2, 1, 5)
        assert folder.results.recovery.runs == 2


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_finished_run_leaves_its_results_and_its_summary(tmp_path: Path, output_format: str) -> None:
    with opened(tmp_path / "out", output_format=output_format) as folder:
        folder.results.append([record(row) for row in (2, 0, 3)] + [record(1, text=None, error="no")])
        folder.finish(SUMMARY_OF_FOUR)
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
    assert finished_summary(tmp_path / "out", RUN) == SUMMARY_OF_FOUR
    assert finished_summary(tmp_path / "out", RUN | {"model": "other"}) is None


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_death_before_the_summary_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_format: str
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path / "out", output_format=output_format) as folder:
        folder.results.append([record(row) for row in range(4)])
        with monkeypatch.context() as patch:
            patch.setattr("app.jobs.run_folder.write_atomically", full)
            with pytest.raises(ResultsUnwritable):
                folder.finish(SUMMARY_OF_FOUR)
        assert (tmp_path / "out" / f"results.{output_format}").exists()
    with opened(tmp_path / "out", output_format=output_format, resume=True) as folder:
        assert len(folder.results.ended) == 4
        folder.finish(SUMMARY_OF_FOUR)
    assert finished_summary(tmp_path / "out", RUN) is not None


def refusal(path: Path, **changes: Any) -> str:
    before = {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}
    with pytest.raises(InvalidSetup) as refused, opened(path, **changes):
        pass
    assert {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()} == before
    return refused.value.message


def test_a_folder_with_anything_else_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path / "unfinished") as folder:
        folder.results.append([record(0)])
    with opened(tmp_path / "finished") as folder:
        folder.results.append([record(row) for row in range(4)])
        folder.finish(SUMMARY_OF_FOUR)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("mine")
    (tmp_path / "a_file").write_text("mine")
    assert "resume with --resume" in refusal(tmp_path / "unfinished")
    other = refusal(tmp_path / "unfinished", run=RUN | {"model": "large"}, resume=True)
    assert "another run (model: 'models/demo' there, 'large' now)" in other
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / MANIFEST).write_text(json.dumps(RUN))
    assert "files of version 1, but this Carousel uses 2" in refusal(tmp_path / "old", resume=True)
    assert "this run is finished" in refusal(tmp_path / "finished", resume=True)
    assert "contains thesis.txt but no run" in refusal(tmp_path / "theirs", resume=True)
    assert "cannot be used" in refusal(tmp_path / "a_file")
    assert "cannot be used" in refusal(tmp_path / "a_file" / "below")


def test_two_processes_cannot_have_it_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "out"):
        assert "another process is using this folder" in refusal(tmp_path / "out", resume=True)


FULL_DISK = """
import resource, sys
from pathlib import Path
from app.jobs.job import ItemOutput
from app.jobs.outputs import RecordFormat
from app.jobs.results import ResultsUnwritable
from app.jobs.run_folder import open_run
folder = open_run(Path(sys.argv[1]), run={}, num_items=100, output_format="jsonl", resume=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    for row in range(100):
        folder.results.append([RecordFormat().generated(ItemOutput(number=row, id=str(row), text="x" * 100))])
except ResultsUnwritable as error:
    print(len(folder.results.ended), folder.unwritable(error).message)
"""


def test_a_full_disk_fails_cleanly_and_keeps_what_was_written(tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: for the writing process it is the same."""
    project = Path(__file__).parents[2]
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "out")]
    printed = subprocess.run(command, check=True, cwd=project, capture_output=True, text=True).stdout
    num_settled, _, message = printed.partition(" ")
    assert 5 < int(num_settled) < 30
    assert f"{num_settled} of 100 rows are stored there" in message
    with opened(tmp_path / "out", run={}, num_rows=100, resume=True) as folder:
        assert len(folder.results.ended) == int(num_settled)
