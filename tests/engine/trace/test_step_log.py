"""The files of a step log: written in their order, rotated, and never waited for."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from app.config import EngineConfig, StepLogConfig
from app.engine.request import Adapter, Grammar, GrammarKind, ModelInfo, Thought
from app.engine.trace.entries import Abort, Arrival, DroppedEntries, Header, parse, to_line
from app.engine.trace.step_log import LogFiles, StepLog, log_header, recorder_of
from app.errors import InvalidSetup
from tests.kit.engine import CountingRunner, build_fake_engine, make_request, run_to_end

FACTS = ModelInfo(max_model_len=100, vocab_size=50, eos_token_ids=(1,))


def header() -> Header:
    return log_header(EngineConfig(), runner=CountingRunner(), model_info=FACTS, num_blocks=8)


def files(folder: Path, *, run: str = "run", file_bytes: int = 10_000, max_files: int = 4) -> LogFiles:
    return LogFiles(folder, run=run, file_bytes=file_bytes, max_files=max_files)


def entries_of(path: Path) -> list[object]:
    first, *lines = path.read_text().splitlines()
    Header.parse(first)
    return [parse(line) for line in lines]


def test_what_is_put_is_in_the_file_in_its_order(tmp_path: Path) -> None:
    log = StepLog(files(tmp_path / "new" / "folder"), header())
    for number in range(500):
        assert log.put(Abort(number))
    log.close()
    log.close()
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert entries_of(path) == [Abort(number) for number in range(500)]
    assert path.stat().st_mode & 0o077 == 0, "prompts are for the owner's eyes only"


def test_a_request_with_an_adapter_is_read_as_it_was_written() -> None:
    request = replace(make_request(), adapter=Adapter(name="sql", path="/sql", digest="5c1"))
    assert parse(to_line(Arrival(3, 1.5, request))) == Arrival(3, 1.5, request)


def test_a_request_with_a_thought_is_read_as_it_was_written_and_one_of_an_older_log_has_none() -> None:
    thought = Thought("<think>", "</think>", is_open=False, max_tokens=7)
    request = make_request(grammar=Grammar(GrammarKind.TEXT, "", thought=thought))
    line = to_line(Arrival(3, 1.5, request))
    assert parse(line) == Arrival(3, 1.5, request)
    entry = json.loads(line)
    del entry["request"]["sampling"]["grammar"]["thought"]
    older = parse(json.dumps(entry))
    assert isinstance(older, Arrival)
    assert older.request.sampling.grammar == Grammar(GrammarKind.TEXT, "")


def test_an_engine_that_ends_leaves_a_complete_log_with_its_header(tmp_path: Path) -> None:
    config = EngineConfig(step_log=StepLogConfig(path=str(tmp_path)))
    recorder = recorder_of(config, runner=CountingRunner(), model_info=FACTS, num_blocks=8)
    engine = build_fake_engine(recorder=recorder)
    run_to_end(engine, make_request(max_tokens=3))
    engine.close()
    (path,) = tmp_path.iterdir()
    found = Header.parse(path.read_text().splitlines()[0])
    assert found.config["step_log"]["path"] == str(tmp_path)
    assert (found.num_blocks, found.facts["vocab_size"], found.launches_ahead) == (8, 50, False)
    assert found.versions["torch"]
    assert len(entries_of(path)) == 1 + 3  # an arrival and its steps


def test_a_full_file_is_followed_by_the_next_and_the_oldest_go(tmp_path: Path) -> None:
    (tmp_path / "steps-20200101T000000-00000000-00001.jsonl").write_text("an older run")
    (tmp_path / "notes.txt").write_text("another program's")
    log = StepLog(files(tmp_path, run="20260101T000000-0", file_bytes=3_000, max_files=3), header())
    for number in range(2_000):
        log.put(Abort(number))
    log.close()
    assert (tmp_path / "notes.txt").exists()
    parts = sorted(tmp_path.glob("*.jsonl"))
    assert len(parts) == 3
    first, *others = (Header.parse(path.read_text().splitlines()[0]).part for path in parts)
    assert first > 3
    assert others == [first + 1, first + 2]
    kept = [entry for path in parts for entry in entries_of(path)]
    assert kept == [Abort(number) for number in range(2_000 - len(kept), 2_000)]


def test_a_file_that_is_being_written_is_not_deleted(tmp_path: Path) -> None:
    slow = StepLog(files(tmp_path, run="1"), header())
    for run in "2345":
        StepLog(files(tmp_path, run=run, max_files=2), header()).close()
    slow.put(Abort(7))
    slow.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps-1-00001.jsonl", "steps-5-00001.jsonl"]
    assert entries_of(tmp_path / "steps-1-00001.jsonl") == [Abort(7)]


class Pipe(LogFiles):
    """Files that take 64 kB and then block until they are read, as a disk that cannot keep up."""

    def __init__(self) -> None:
        super().__init__(Path(), run="run", file_bytes=10**9, max_files=1)
        self._reading, self._writing = os.pipe()

    def open_part(self, part: int) -> io.BufferedWriter:
        return open(self._writing, "wb")

    def read_all(self) -> list[str]:
        with open(self._reading, "rb") as file:
            return file.read().decode().splitlines()


def test_with_a_slow_disk_entries_are_dropped_and_counted_without_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = Pipe()
    log = StepLog(pipe, header(), max_pending=100)
    taken, number = [], 0
    with caplog.at_level(logging.WARNING):
        while log.num_lost < 50:  # the files are not read: this would never end if it blocked
            if log.put(Abort(number)):
                taken.append(number)
            number += 1
    assert [record.message for record in caplog.records] == [
        "the disk is too slow for the step log, which drops entries; serving continues"
    ]
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(pipe.read_all()))
    reader.start()
    while not log.put(Abort(number)):  # until the writer's thread has caught up
        number += 1
    num_lost = log.num_lost
    log.close()
    reader.join()
    entries = [parse(line) for line in lines[1:]]
    assert [entry.number for entry in entries if isinstance(entry, Abort)] == [*taken, number]
    holes = [entry.num_entries for entry in entries if isinstance(entry, DroppedEntries)]
    assert sum(holes) == num_lost == number - len(taken)
    assert entries[-2:] == [DroppedEntries(holes[-1]), Abort(number)]


class FillingDisk(LogFiles):
    """Has room for one file."""

    def open_part(self, part: int) -> io.BufferedWriter:
        return super().open_part(part) if part == 1 else open("/dev/full", "wb")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a Linux thing")
def test_a_disk_that_fails_ends_the_log_and_not_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(FillingDisk(tmp_path, run="run", file_bytes=1_000, max_files=4), header())
    while log.put(Abort(1)):
        pass
    log.close()
    assert "the step log can no longer be written; serving continues" in caplog.text
    assert not log.put(Abort(2))


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = EngineConfig(step_log=StepLogConfig(path=str(tmp_path / "file" / "folder")))
    with pytest.raises(InvalidSetup, match=r"step_log\.path: .*file/folder is not writable"):
        recorder_of(config, runner=CountingRunner(), model_info=FACTS, num_blocks=8)
