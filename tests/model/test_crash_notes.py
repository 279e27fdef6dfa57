"""Notes of processes that crash. Crashes of engines are in `cuda/test_gpu_backends.py`."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.model.crash_notes import close_note, crashes, ending_hangs, open_note


@pytest.fixture(autouse=True)
def _no_note() -> Iterator[None]:
    yield
    close_note()


def crashes_in_child(folder: Path, work: str) -> None:
    pid = os.fork()
    if pid == 0:
        open_note(folder, "other work")
        open_note(folder, work)
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)


def test_a_note_of_a_process_that_crashed_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        crashes_in_child(tmp_path, f"work {number}")
    found = list(crashes(tmp_path))
    assert sorted(work for work, *_ in found) == ["work 0", "work 1"]
    assert {note for _, note, _ in found} == {"Fatal Python error: Segmentation fault"}
    assert "crashes_in_child" in caplog.text, "the traceback"
    assert list(crashes(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_crash_leaves_a_note_though_a_library_has_replaced_the_handler(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.enable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        open_note(tmp_path, "work")
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)
    assert [work for work, *_ in crashes(tmp_path)] == ["work"]


def test_a_process_that_lives_has_one_note_and_takes_it_away(tmp_path: Path) -> None:
    open_note(tmp_path, "a first one")
    open_note(tmp_path, "second")
    [path] = tmp_path.iterdir()
    assert path.read_text() == "second\n"
    assert list(crashes(tmp_path)) == []
    close_note()
    assert list(tmp_path.iterdir()) == []
    assert faulthandler.is_enabled()


def test_a_child_of_a_process_has_no_part_in_its_note(tmp_path: Path) -> None:
    open_note(tmp_path, "work")
    pid = os.fork()
    if pid == 0:
        close_note()
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)
    [path] = tmp_path.iterdir()
    assert path.read_text() == "work\n"


def test_a_block_within_another_does_not_end_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: ended.append("begins"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: ended.append("ends"))
    open_note(tmp_path, "work")
    with ending_hangs():
        with ending_hangs():
            pass
        assert ended == ["begins"]
    assert ended == ["begins", "ends"]


def test_a_file_of_other_content_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "crash-1").write_bytes(b"\xff\x00")
    (tmp_path / "crash-2").mkdir()
    assert list(crashes(tmp_path)) == []


def test_without_a_folder_there_is_no_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    open_note(tmp_path / "file" / "deeper", "work")
    assert "a crash will not be recorded" in caplog.text
    assert list(crashes(tmp_path / "nowhere")) == []
